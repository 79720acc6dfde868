"""The downstream proxy: its task, its answers, its published figures."""

import numpy as np
import pytest
import torch

from pagedkv.bench import proxy, quality
from pagedkv.evidence import published


def test_the_published_accuracies_and_disagreements_come_out():
    ours = {(r["seq_len"], r["noise"], r["granularity"]): r for r in proxy.run("cpu")}
    for theirs in published("proxy"):
        row = ours[theirs["seq_len"], theirs["noise"], theirs["granularity"]]
        assert row["trials"] == theirs["trials"] == 2000
        for field in ("fp32_accuracy", "int8_accuracy"):
            assert row[field] == pytest.approx(theirs[field], abs=5.1e-4), "published to a tenth of a percent"
        assert row["disagreement"] == theirs["disagreement"]


def test_half_of_the_rows_belong_to_the_concept_that_is_asked_for():
    drawn = proxy.draw(np.random.default_rng(0), seq_len=16, noise=0.0, trials=40)
    p = drawn.problem
    assert torch.allclose(drawn.concepts.norm(dim=1), torch.ones(20))
    assert torch.equal(p.q[:, 0], drawn.concepts[drawn.labels]) and torch.equal(p.q[:, 0], p.q[:, 7])
    assert torch.equal(p.k, p.v), "without noise a row's key and value are its concept"
    mine = (p.k[:, :, 0] == drawn.concepts[drawn.labels][:, None]).all(-1).sum(1)
    assert (mine >= 8).all() and (mine < 16).all()


def test_the_answer_is_the_nearest_concept_whatever_the_length_of_the_vector():
    concepts = torch.eye(4)
    output = torch.tensor([[[0.1, 0.0, 0.0, 0.0]], [[5.0, 9.0, 0.0, 1.0]], [[0.0, 0.0, 0.0, 1e-6]]])
    assert proxy.classify(output, concepts).tolist() == [0, 1, 3]


def test_exact_attention_is_that_of_the_quality_experiment():
    p = proxy.draw(np.random.default_rng(1), seq_len=16, noise=0.5, trials=7).problem
    torch.testing.assert_close(proxy.exact_attention(p), quality.exact_attention(p)[:, :1], rtol=1e-12, atol=1e-12)


def test_every_row_holds_together():
    for row in proxy.run("cpu", trials=50):
        assert abs(row["fp32_accuracy"] - row["int8_accuracy"]) <= row["disagreement"] + 1e-12
        assert row["disagreement_low"] <= row["disagreement"] <= row["disagreement_high"]
        assert row["noise"] > 0.3 or row["fp32_accuracy"] == 1


def test_the_interval_is_wilsons():
    assert proxy.wilson(0, 2000) == pytest.approx((0, 0.00191712), rel=1e-4)
    assert proxy.wilson(50, 100) == pytest.approx((0.403832, 0.596168), rel=1e-5)
    assert proxy.wilson(10, 10)[1] == 1
