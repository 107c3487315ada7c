"""Dropout of the residual stream, and heads with weights of their own."""

import pytest
import torch
from torch import nn

from ndlightnet import NDLightNet, pack
from ndlightnet.layout import Grid
from ndlightnet.nn.block import Block
from ndlightnet.nn.mixers import Identity, LightNetAttention
from ndlightnet.training import TextTask
from ndlightnet.training.language.measures import token_nll


def words(**options) -> NDLightNet:
    return NDLightNet(1, **{"vocab_size": 20, "causal": True, "embed_dim": 16, "depth": 2} | options)


class Doubled(nn.Module):
    """An MLP whose output is linear in its input."""

    def forward(self, x):
        return 2 * x


def linear_block(dropout: float) -> Block:
    """A block whose mixer gives what it gets and whose MLP does not see what was dropped before it."""
    block = Block(8, lambda dim: Identity(dim), dropout=dropout).double()
    block.mlp = Doubled()
    return block


def test_the_mean_over_many_draws_is_the_branch_without_dropout():
    """Of the first branch, whose input is not random: 2,000 draws of x / (1 - p) with probability 1 - p have a mean
    whose deviation is |x| sqrt(p / (1 - p) / 2000); 5 of them hold for all 240 cells but one time in 7,000."""
    p, draws = 0.3, 2000
    block = linear_block(p)
    block.mlp = nn.Identity()
    block.norm2.weight.data.zero_()  # the second branch is zero
    block.norm2.bias.data.zero_()
    x = torch.randn(5, 6, 8, dtype=torch.float64)
    exact = block.eval()(x) - x
    block.train()
    with torch.no_grad():
        outputs = torch.stack([block(x) - x for _ in range(draws)])
    deviation = exact.abs() * (p / (1 - p) / draws) ** 0.5
    assert ((outputs.mean(0) - exact).abs() <= 5 * deviation + 1e-12).all() and exact.abs().max() > 1
    kept = outputs / exact
    assert torch.allclose(kept, (kept > 0.5).double() / (1 - p))  # each is dropped, or grown by as much


def test_masks_differ_by_sample_token_channel_step_and_branch():
    block = linear_block(0.5)
    x = torch.randn(1, 1, 8, dtype=torch.float64).expand(16, 9, 8)
    first, second = block(x) - x, block(x) - x
    for a, b in ((first, second), (first[0], first[1]), (first[:, 0], first[:, 1])):
        assert not torch.equal(a == 0, b == 0) and not torch.equal(a, b)
    both = first.flatten(0, 1)
    assert (both == 0).any(1).any() and not (both == 0).all(1).any()  # neither token by token nor none
    assert 0.15 < (first == 0).double().mean() < 0.35  # a quarter: both branches are dropped
    net = words(dropout=0.5, depth=1)
    embedded = net.embed_drop(torch.ones(3, 400, 16))
    assert 0.45 < (embedded == 0).float().mean() < 0.55 and not torch.equal(embedded[0], embedded[1])


def test_without_dropout_nothing_is_drawn():
    net, state = words().train(), torch.get_rng_state()
    tokens = torch.randint(20, (2, 9), generator=torch.Generator().manual_seed(0))
    net(tokens).sum().backward()
    assert torch.equal(state, torch.get_rng_state())
    assert not any(isinstance(module, nn.Dropout) for block in net.blocks for module in block.modules())
    assert isinstance(net.embed_drop, nn.Identity)
    words(dropout=0.1).train()(tokens)
    drawn = torch.get_rng_state()
    assert not torch.equal(state, drawn)
    words(dropout=0.1).eval()
    torch.set_rng_state(state)
    dropping = words(dropout=0.1).eval()
    state = torch.get_rng_state()
    dropping(tokens)
    assert torch.equal(state, torch.get_rng_state())


def test_weights_are_those_of_a_network_without_it(close):
    """So a checkpoint fits both, and they give the same in eval."""
    plain, dropping = words().eval(), words(dropout=0.4)
    dropping.load_state_dict(plain.state_dict())
    tokens = torch.randint(20, (2, 9))
    close(dropping.eval()(tokens), plain(tokens), 0)
    assert not torch.equal(dropping.train()(tokens), plain(tokens))
    assert {block.dropout.p for block in dropping.blocks} == {dropping.embed_drop.p} == {0.4}
    with pytest.raises(ValueError, match=r"1\.5"):
        words(dropout=1.5)


def test_packed_samples_are_dropped_apart():
    net = words(dropout=0.5, depth=1)
    tokens = torch.zeros(30, dtype=torch.int64)
    features = net.forward_features(pack([tokens, tokens])).values
    assert not torch.equal(features[:30], features[30:])


@pytest.mark.parametrize("options", [{}, {"mixer": LightNetAttention, "depth": 1}])
def test_step_by_step_it_is_the_network_in_eval(close, options):
    net = words(dropout=0.4, **options).double().eval()
    tokens = torch.randint(20, (2, 11))
    stream = net.stream(2)
    with torch.no_grad():
        steps = torch.cat([stream(tokens[:, i : i + 1]) for i in range(11)], 1)
        close(steps, net(tokens), 1e-10)
    block = Block(16, LightNetAttention, dropout=0.4).double().eval()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    state, outputs = block.mixer.init_state(2), []
    for i in range(7):
        y, state = block.advance(x[:, i : i + 1], state, torch.full((2,), i), Grid((1,)))
        outputs.append(y)
    close(torch.cat(outputs, 1), block(x, causal=True), 1e-10)


# ------------------------------------------------------------------------------- heads
def test_a_head_that_is_not_tied_has_weights_of_its_own():
    tied, free = words(), words(tied=False)
    assert tied.head.weight is tied.embed.weight and free.head.weight is not free.embed.weight
    sizes = [sum(x.numel() for x in net.parameters()) for net in (tied, free)]
    assert sizes[1] - sizes[0] == 20 * 16 + 20
    assert free.head.weight.std() > 0.05  # Xavier's, not an embedding's
    for move in (lambda net: net.double(), lambda net: words(tied=False, device="meta").to_empty(device="cpu")):
        moved = move(free)
        assert moved.head.weight.data_ptr() != moved.embed.weight.data_ptr()
    again = words(tied=False)
    again.load_state_dict(free.state_dict())
    again.double()
    tokens = torch.randint(20, (2, 9))
    assert torch.equal(again(tokens), free(tokens))


@pytest.mark.parametrize("tied", [True, False])
def test_both_kinds_of_head_train(tied):
    """The loss is that of the logits, bias and all, and its steps lower it."""
    net = words(tied=tied)
    if not tied:
        nn.init.normal_(net.head.bias)
    tokens, loss = torch.randint(20, (4, 12)), TextTask(net).called
    before = {name: x.detach().clone() for name, x in net.named_parameters()}
    torch.testing.assert_close(loss(tokens), token_nll(net, tokens).mean())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        value = loss(tokens)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < losses[0] - 0.3
    assert all(not torch.equal(x, before[name]) for name, x in net.named_parameters())
    assert ("head.weight" in before) == (not tied) and (net.head.weight is net.embed.weight) == tied


def test_tied_is_for_language_models_alone():
    """A classifier of texts has a head of its own in any case."""
    net = NDLightNet(1, vocab_size=20, num_classes=20, embed_dim=16, depth=1)
    assert net.head.weight is not net.embed.weight and not net.tied
