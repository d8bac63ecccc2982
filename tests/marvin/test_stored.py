import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import marvin
from fixedpoint_kernels._torch_private.modes import saving_hooks
from marvin import MSGD, FixedPolicy, MuppetPolicy, Quantized, store_codes


class Net(nn.Module):
    """Convolution, embedding, attention, a tied pair, batch norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.tokens = nn.Embedding(5, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.two.weight = self.one.weight
        self.head = nn.Linear(8, 3)

    def forward(self, x, tokens):
        x = self.norm(self.conv(x)).relu().mean((2, 3)).repeat(1, 2).unsqueeze(1)
        y = torch.cat([x, self.tokens(tokens)], 1)
        y = y + self.attention(y, y, y)[0]
        return self.head(self.two(self.one(y).relu()).mean(1))


def has_values(p):
    return p.untyped_storage().nbytes() >= p.numel() * p.element_size()


def inputs(i):
    g = torch.Generator().manual_seed(i)
    return torch.randn(6, 1, 7, 7, generator=g), torch.randint(0, 5, (6, 4), generator=g)


def train(model, optimizer, steps):
    for i in steps:
        optimizer.zero_grad()
        loss = model(*inputs(i)).square().mean()
        loss.backward()
        optimizer.step(loss=loss)


def make(policy=None):
    model = Net()
    if policy is None:
        return model, MSGD(model.named_parameters(), lookback=(2, 4), resolution=(9, 12))
    return model, Quantized(torch.optim.AdamW(model.named_parameters()), policy)


@pytest.mark.filterwarnings("error", "ignore:activations are not rounded")
def test_checkpoints_keep_as_little_and_no_bit_changes():
    """Hooks for saved tensors outside of it see what layers save, but for weights."""
    own, counts = [make() for _ in range(2)], []
    for model, optimizer in own:
        marvin.quantize_activations(model, optimizer)
    store_codes(*own[1])

    def count(x):
        counts[-1] += x.untyped_storage().nbytes() > 8 * x.element_size()
        return x

    for model, optimizer in own:
        counts.append(0)
        for i in range(4):
            optimizer.zero_grad()
            y = checkpoint(model, *inputs(i), use_reentrant=False)
            y.square().mean().backward()
            optimizer.step(loss=1.0)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            model(*inputs(9)).sum().backward()
        assert counts[-1] > 5
    (model, _), (stored, _) = own
    torch.testing.assert_close(dict(stored.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.filterwarnings("error")
def test_checkpoints_may_end_before_a_layer():
    """They stop the second run where they have all: here where the last layer rounds, which keeps no input."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = Quantized(sgd, marvin.StaticPolicy(8, 8))
    marvin.quantize_activations(model, optimizer)
    x = torch.randn(16, 8)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step(loss=1.0)
    model[3].requires_grad_(False)
    store_codes(model, optimizer)
    found = []
    for y in (model(x), checkpoint(model, x, use_reentrant=False)):
        optimizer.zero_grad()
        y.square().mean().backward()
        found.append([p.grad.clone() for p in model[:3].parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_checkpoint_of_stored_weights_saves_its_inputs_alone():
    model, optimizer = make()
    store_codes(model, optimizer)
    seen = []

    def see(x):
        seen.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(see, lambda x: x):
        y = checkpoint(model, *inputs(0), use_reentrant=False)
    assert sum(x.numel() > 0 for x in seen) <= 2  # some torches save one without elements
    y.sum().backward()


@pytest.mark.parametrize("policy", [None, FixedPolicy(8, 5)])
@pytest.mark.filterwarnings("error")
def test_training_and_evaluation_do_not_change_by_a_bit(policy):
    model, optimizer = make(copy.copy(policy))
    stored_model, stored_optimizer = make(copy.copy(policy))
    stored = store_codes(stored_model, stored_optimizer)
    train(model, optimizer, range(10))
    train(stored_model, stored_optimizer, range(10))
    assert not has_values(stored_model.head.weight)
    with torch.no_grad():
        x = inputs(99)
        torch.testing.assert_close(stored_model.eval()(*x), model.eval()(*x), rtol=0, atol=0)
    assert not has_values(stored_model.head.weight)
    torch.testing.assert_close(
        dict(stored_model.state_dict()), dict(model.state_dict()), rtol=0, atol=0
    )
    stored.remove()
    train(model, optimizer, range(10, 14))
    train(stored_model, stored_optimizer, range(10, 14))
    torch.testing.assert_close(
        dict(stored_model.state_dict()), dict(model.state_dict()), rtol=0, atol=0
    )


def test_bytes_are_those_of_the_codes():
    model, optimizer = make(FixedPolicy(8, 5))
    stored = store_codes(model, optimizer)
    elements = 4 * 9 + 5 * 8 + 24 * 8 + 8 * 8 + 8 * 8 + 8 * 3
    assert (stored.size_bytes(), stored.float_bytes()) == (elements, 4 * elements)
    assert not any(has_values(p) for p in model.parameters() if p.ndim >= 2)


def test_only_one_layer_is_decoded_at_a_time():
    model, optimizer = make(FixedPolicy(8, 5))
    stored = store_codes(model, optimizer)
    full = []

    def count(*_):
        full.append(sum(has_values(p) for p in model.parameters() if p.ndim >= 2))

    for module in (model.conv, model.tokens, model.one, model.head):
        module.register_forward_hook(count, prepend=True)
    decoded = []
    decode = stored._decoded
    stored._decoded = lambda p: decoded.append(p) or decode(p)
    loss = model(*inputs(0)).sum()
    assert full == [1] * 4
    forward = len(decoded)
    loss.backward()
    assert len(decoded) >= forward + 5  # backward kept none: conv, attention's two, linear layers
    assert not has_values(model.one.weight)
    assert model.one.weight.grad.shape == (8, 8)


def test_checkpoints_have_values_and_loading_stores_them():
    model, optimizer = make(FixedPolicy(8, 5))
    expected = copy.deepcopy(model.state_dict())
    stored = store_codes(model, optimizer)
    torch.testing.assert_close(dict(model.state_dict()), dict(expected), rtol=0, atol=0)
    changed = {k: torch.zeros_like(v) for k, v in expected.items()}
    model.load_state_dict(changed)
    assert not has_values(model.head.weight)
    assert all((codes == 0).all() for codes, _ in stored._codes.values())


def evaluate(optimizer, model, i=50):
    optimizer.zero_grad()
    loss = model(*inputs(i)).square().mean()
    loss.backward()
    return loss


def write(optimizer, model, stored):
    if stored:
        stored.restore()
    with torch.no_grad():
        model.head.weight.mul_(0.5)
        model.one.weight.data = model.one.weight * 0.5
    with torch.no_grad():
        model(*inputs(60))
    evaluate(optimizer, model)


BETWEEN = {  # what people do between two steps, with the handle of ``store_codes`` or None
    "state": lambda optimizer, model, stored: optimizer.state_dict(),
    "loaded": lambda optimizer, model, stored: optimizer.load_state_dict(
        copy.deepcopy(optimizer.state_dict())
    ),
    "end of an epoch": lambda optimizer, model, stored: optimizer.end_epoch(),
    "adopted": lambda optimizer, model, stored: optimizer.adopt_weights(),
    "closure": lambda optimizer, model, stored: optimizer.step(lambda: evaluate(optimizer, model)),
    "written": write,
}


@pytest.mark.filterwarnings("ignore:weights changed outside of:UserWarning")
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
@pytest.mark.parametrize("policy", [None, FixedPolicy(8, 5), MuppetPolicy(patience=1)])
def test_what_is_done_between_steps_has_values(policy, between):
    found = []
    for is_stored in (False, True):
        model, optimizer = make(policy)
        stored = store_codes(model, optimizer) if is_stored else None
        train(model, optimizer, range(3))
        between(optimizer, model, stored)
        if stored is not None and between is not write:
            assert has_values(model.head.weight) == isinstance(policy, MuppetPolicy)
        train(model, optimizer, range(3, 6))
        found.append((dict(model.state_dict()), optimizer.state_dict()))
    torch.testing.assert_close(*(weights for weights, _ in found), rtol=0, atol=0)
    states = [[*state["state"].values()] for _, state in found]
    torch.testing.assert_close(
        *[[own["master"] for own in state] for state in states], rtol=0, atol=0
    )


@pytest.mark.filterwarnings("ignore:weights changed outside of:UserWarning")
def test_a_state_has_what_was_written_to_weights():
    """They are compared with what the optimizer wrote, by their values."""
    states = []
    for is_stored in (False, True):
        model, optimizer = make(FixedPolicy(8, 5))
        stored = store_codes(model, optimizer) if is_stored else None
        train(model, optimizer, range(3))
        write(optimizer, model, stored)
        states.append(optimizer.state_dict()["state"])
    for plain, own in zip(states[0].values(), states[1].values(), strict=True):
        assert torch.equal(own["master"], plain["master"])


def test_a_written_weight_has_its_own_gradient():
    model, optimizer = make(FixedPolicy(8, 5))
    plain = copy.deepcopy(model)
    stored = store_codes(model, optimizer)
    stored.restore()
    for net in (model, plain):
        with torch.no_grad():
            net.head.weight.fill_(0.3)
        net(*inputs(0)).sum().backward()
    torch.testing.assert_close(model.one.weight.grad, plain.one.weight.grad, rtol=0, atol=0)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, _: marvin.freeze(model),
        lambda model, _: marvin.calibrate(model, [torch.ones(2, 4)]),
        store_codes,
    ],
    ids=["freeze", "calibrate", "store_codes"],
)
def test_what_needs_values_says_how_to_get_them(call):
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = Quantized(torch.optim.SGD(model.parameters(), lr=0.1), FixedPolicy(8, 5))
    marvin.quantize_activations(model, optimizer)
    stored = store_codes(model, optimizer)
    with pytest.raises(ValueError, match=r"got codes in the place of 0\.weight: call remove\(\)"):
        call(model, optimizer)
    stored.remove()
    torch.save(marvin.freeze(model), io.BytesIO())
    call(model, optimizer)


def test_one_optimizer_may_have_two_stored_models():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    params = [*first.parameters(), *second.parameters()]
    optimizer = Quantized(torch.optim.SGD(params, lr=0.1), FixedPolicy(8, 5))
    handles = [store_codes(model, optimizer) for model in (first, second)]
    optimizer.state_dict()
    handles[0].remove()
    assert has_values(first.weight)
    assert not has_values(second.weight)
    optimizer.state_dict()
    assert not has_values(second.weight)
    handles[1].remove()
    assert not optimizer.stored


def test_backward_after_the_step_is_refused():
    model, optimizer = make(FixedPolicy(8, 5))
    store_codes(model, optimizer)
    loss = model(*inputs(0)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="must come before the step"):
        loss.backward()


def test_what_has_no_codes_stays():
    model, optimizer = make(MuppetPolicy())
    stored = store_codes(model, optimizer)
    assert stored.size_bytes() == 0
    train(model, optimizer, range(2))
    assert has_values(model.head.weight)
    with pytest.raises(ValueError, match="no module of the model has a layer"):
        store_codes(nn.Linear(2, 2), optimizer)


@pytest.mark.filterwarnings("ignore:activations are not rounded where:UserWarning")
def test_activations_may_be_quantised_too():
    models = []
    for is_stored in (False, True):
        model, optimizer = make(FixedPolicy(10, 6))
        marvin.quantize_activations(model, optimizer)
        if is_stored:
            store_codes(model, optimizer)
        train(model, optimizer, range(3))
        models.append(dict(model.state_dict()))
    torch.testing.assert_close(models[0], models[1], rtol=0, atol=0)


MOVES = {
    "memory format": lambda model: model.to(memory_format=torch.channels_last),
    "bfloat16": lambda model: model.bfloat16(),
    "half": lambda model: model.half(),
    "copied": lambda model: model._apply(lambda t: t.clone()),
    "a layer": lambda model: model[0].to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("then", ["forward", "state", "step", "restore"])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.filterwarnings("error")
def test_a_model_that_is_moved_keeps_its_values(move, then):
    torch.manual_seed(0)
    # one weight of a single element
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1))
    model.append(nn.Linear(1, 1))
    optimizer = MSGD(model.named_parameters(), lr=0.05)
    plain = copy.deepcopy(model)
    move(plain)
    stored = store_codes(model, optimizer)
    masters = copy.deepcopy([own["master"] for own in optimizer.state_dict()["state"].values()])
    move(model)
    x = torch.randn(2, 2, 4, 4, dtype=model[3].bias.dtype)
    if then == "forward":
        torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)
    elif then == "step":
        optimizer.step()
    elif then == "restore":
        stored.restore()
        assert model[0].weight.stride() == plain[0].weight.stride()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
    kept = [own["master"] for own in optimizer.state_dict()["state"].values()]
    torch.testing.assert_close(kept, masters, rtol=0, atol=0)
    stored.remove()
    assert model[0].weight.stride() == plain[0].weight.stride()


COPIES = {
    "deepcopy": copy.deepcopy,
    "a layer": lambda model: copy.deepcopy(model[0]),
    "pickle": pickle.dumps,
    "save": lambda model: torch.save(model, io.BytesIO()),
    "freeze": marvin.freeze,
    "calibrate": lambda model: marvin.calibrate(model, [torch.ones(2, 4)]),
    "store_codes": lambda model: store_codes(model, marvin.owners.owner_of(model[0].weight)),
}


@pytest.mark.parametrize("is_moved", [False, True])
@pytest.mark.parametrize("call", COPIES.values(), ids=COPIES)
def test_copies_need_values(call, is_moved):
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = Quantized(torch.optim.SGD(model.named_parameters(), lr=0.1), FixedPolicy(8, 5))
    marvin.quantize_activations(model, optimizer)
    store_codes(model, optimizer)
    if is_moved:
        model.bfloat16()
    with pytest.raises(ValueError, match=r"got codes in the place of 0\.weight: call remove\(\)"):
        call(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_model_with_values_is_tied_to_nothing(copied):
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = Quantized(torch.optim.SGD(model.named_parameters(), lr=0.1), FixedPolicy(8, 5))
    stored = store_codes(model, optimizer)
    stored.restore()
    other, x = copied(model), torch.ones(2, 4)
    torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)
    assert has_values(other[0].weight)
    other.load_state_dict(other.state_dict())
    assert has_values(other[0].weight)


@pytest.mark.parametrize("is_converted", [False, True])
def test_an_interrupt_leaves_no_hooks_on_saved_tensors(is_converted, monkeypatch):
    """Those of the module that was interrupted stayed for good, and checkpoints lost theirs: later steps were errors."""
    runs = []
    for is_interrupted in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
        optimizer = Quantized(sgd, FixedPolicy(8, 5))
        stored = store_codes(model, optimizer)
        if is_converted:
            marvin.integer.convert(model)
            model(torch.ones(2, 4))

        def interrupt(*_):
            raise KeyboardInterrupt

        if is_interrupted:
            with monkeypatch.context() as patch:
                patch.setattr(nn.functional, "linear", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    checkpoint(model, torch.ones(2, 4), use_reentrant=False)
            assert saving_hooks() is None
        for _ in range(2):
            checkpoint(model, torch.ones(2, 4), use_reentrant=False).sum().backward()
            optimizer.step()
        stored.remove()
        assert not any("forward" in vars(layer) for layer in model)
        runs.append(model.state_dict())
    assert all(map(torch.equal, *(run.values() for run in runs)))
