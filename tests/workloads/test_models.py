"""The models written here, against simple references."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from joulemark.workloads import models  # noqa: E402

TINY = models.TransformerSize(vocabulary=97, positions=24, width=32, layers=3, heads=4)


@pytest.fixture
def gpt2():
    torch.manual_seed(3)
    return models.Gpt2(TINY).double().eval()


@pytest.mark.parametrize("batch_size", [1, 3, 11])
def test_decoding_with_the_cache_equals_a_full_forward(gpt2, batch_size):
    tokens = torch.randint(0, TINY.vocabulary, (batch_size, 17))
    decode = models.Decode(gpt2, batch_size, 17, prompt=tokens[:, :-1])
    with torch.no_grad():
        expected = gpt2(tokens)[:, -1]
        for _ in range(2):
            torch.testing.assert_close(decode(tokens[:, -1:]), expected)
        other = tokens.clone()
        other[:, -1] = (tokens[:, -1] + 1) % TINY.vocabulary
        torch.testing.assert_close(decode(other[:, -1:]), gpt2(other)[:, -1])


def test_prefill_gives_the_next_token_and_the_cache_to_go_on(gpt2):
    tokens = torch.randint(0, TINY.vocabulary, (2, 10))
    prefill = models.Prefill(gpt2, 2, 10)
    with torch.no_grad():
        torch.testing.assert_close(prefill(tokens), gpt2(tokens)[:, -1])
        decode = models.Decode(gpt2, 2, 10, prompt=tokens[:, :-1])
        torch.testing.assert_close(decode.cache[..., :9, :], prefill.cache[..., :9, :])


def test_a_decoder_does_not_see_the_future(gpt2):
    tokens = torch.randint(0, TINY.vocabulary, (2, 10))
    changed = tokens.clone()
    changed[:, 6:] = (tokens[:, 6:] + 5) % TINY.vocabulary
    with torch.no_grad():
        before, after = gpt2(tokens), gpt2(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_the_decoders_output_shares_the_embedding(gpt2):
    assert not [name for name, _ in gpt2.named_parameters() if "head" in name]
    torch.testing.assert_close(gpt2.logits(torch.eye(32).double()), gpt2.tokens.weight.T)


def test_attention_against_the_written_out_formula():
    torch.manual_seed(5)
    attention = models.Attention(TINY).double().eval()
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    query, key, value = (part.view(2, 7, 4, 8).transpose(1, 2) for part in attention.qkv(x).split(32, dim=-1))
    weights = (query @ key.transpose(-1, -2) / 8**0.5).softmax(-1)
    expected = attention.out((weights @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x, False), expected)


def test_an_encoder_sees_the_whole_sequence():
    torch.manual_seed(7)
    bert = models.BertClassifier(TINY).eval()
    tokens = torch.randint(0, TINY.vocabulary, (2, 12))
    changed = tokens.clone()
    changed[:, -1] = (tokens[:, -1] + 1) % TINY.vocabulary
    assert bert(tokens).shape == (2, 2)
    assert not torch.equal(bert(tokens), bert(changed))


def test_settled_batch_norms_keep_the_scale_of_activations():
    torch.manual_seed(1)
    layers = [(torch.nn.Conv2d(8, 8, 3, padding=1, bias=False), torch.nn.BatchNorm2d(8)) for _ in range(12)]
    net = torch.nn.Sequential(*(one for pair in layers for one in pair))
    images = torch.randn(4, 8, 16, 16)
    net.eval()
    assert net(images).std() < 0.01
    models.settle_batch_norms(net, images)
    net.eval()
    assert 0.5 < net(images).std() < 2
    assert {norm.momentum for _, norm in layers} == {0.1}
