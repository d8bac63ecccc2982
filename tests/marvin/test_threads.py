"""Threads of Python that call one model at once, from the first call on: each gets what it would get alone."""

import copy
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import marvin
from benchmarks.ops.int8_inference import frozen_model
from fixedpoint_kernels import products
from fixedpoint_kernels.fused import Segment
from marvin.integer import prepack
from marvin.integer.chain_run import ChainRun
from marvin.integer.fusion import Fused
from marvin.integer.inference_run import InferenceRun
from marvin.integer.programs import Programs
from marvin.integer.token_inference import TokenInference
from train.resnet20 import Block

pytestmark = pytest.mark.skipif(
    not products.path().is_own, reason="no own path of products on this processor"
)


class Images(nn.Module):
    """One chain of convolutions, for images of any size."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.block, self.fc = Block(8, 16), nn.Linear(16, 10)

    def forward(self, x):
        return self.fc(self.block(torch.relu(self.norm(self.conv(x)))).mean((2, 3)))


class Draws(Images):
    """Another thread draws random numbers, while this one's code runs."""

    drawn: ClassVar[list[float]] = []

    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            self.drawn.append(pool.submit(lambda: float(torch.rand(()))).result())
        return super().forward(x)


class Tokens(nn.Module):
    """A chain of a transformer's layers, and a layer alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, "gelu", 1e-5, True, True)
        self.fc = nn.Linear(32, 10)

    def forward(self, x):
        return self.fc(self.layer(x).mean(1))


NETWORKS = {
    "images": (Images, [(3, 12, 12), (3, 8, 8), (3, 9, 7)]),
    "tokens": (lambda: marvin.spell_attention(Tokens()), [(6, 32), (4, 32), (9, 32)]),
}


@pytest.fixture(params=NETWORKS)
def name(request):
    """Which network."""
    return request.param


@pytest.fixture
def often():
    """Threads take turns after each few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def batches(name):
    generator = torch.Generator().manual_seed(0)
    shapes = NETWORKS[name][1]
    return [torch.randn(n, *shape, generator=generator) for shape in shapes for n in (1, 2, 8)]


def frozen(name):
    torch.manual_seed(0)
    return frozen_model(NETWORKS[name][0], batches(name)[2])


def run(model, x, context=torch.no_grad):
    with context():
        return model(x).clone()


def chains_of(model):
    """Return the chains of a frozen model, and of its children."""
    modes = [m.forward._modes[False] for m in model.modules() if isinstance(m.forward, Fused)]
    runs = [own for mode in modes for graph in mode._runs.values() for own in graph.chains]
    return [own for own in runs if isinstance(own, InferenceRun | TokenInference)]


def at_once(works):
    """Run functions in threads of their own, which begin together; return what they return."""
    start = threading.Barrier(len(works))

    def begin(work):
        start.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return [found.result() for found in [pool.submit(begin, work) for work in works]]


@pytest.mark.parametrize("is_prepacked", [False, True])
@pytest.mark.usefixtures("often")
def test_first_calls_and_later_ones_have_the_bits_of_one_thread(name, is_prepacked):
    model, xs = frozen(name), batches(name)
    wanted = [run(copy.deepcopy(model), x) for x in xs]
    for count in (2, 8):
        models = copy.deepcopy(model), copy.deepcopy(model)
        if is_prepacked:
            any(map(prepack, models))

        def serve(k, models=models):
            context = (torch.no_grad, torch.inference_mode)[k % 2]
            order = [(k + i) % len(xs) for i in range(len(xs))]
            return {i: run(models[k // 2 % 2], xs[i], context) for i in order}

        for found in at_once([lambda k=k: serve(k) for k in range(count)]):
            for i, y in found.items():
                torch.testing.assert_close(y, wanted[i], rtol=0, atol=0)


@dataclass(frozen=True, eq=False)
class Sized:
    """Stands for a program."""

    held_bytes: int


def test_a_program_is_made_once_and_kept():
    programs, made = Programs(), []

    def make(_):
        time.sleep(0.05)
        made.append(None)
        return Sized(2**10)

    found = at_once([lambda: programs.get("key", make)] * 4)
    assert len(made) == len({*found}) == 1


@pytest.mark.usefixtures("often")
def test_programs_go_while_threads_ask_for_others():
    programs = Programs()

    def ask(first):
        return [programs.get((first + i) % 6, lambda _: Sized(2**30)) for i in range(2000)]

    at_once([lambda first=first: ask(first) for first in range(4)])


def test_a_chain_runs_fused_while_another_thread_looks_at_it_first(monkeypatch):
    model, x = frozen("images"), batches("images")[0]
    described, forward, fused = InferenceRun._described, InferenceRun.forward, []

    def slow(*args):
        time.sleep(0.5)
        return described(*args)

    monkeypatch.setattr(InferenceRun, "_described", slow)
    monkeypatch.setattr(InferenceRun, "forward", lambda *args: fused.append(0) or forward(*args))
    at_once([lambda: run(model, x)] * 4)
    assert len(fused) == 4


class Overwritten:
    """An attribute that another thread overwrites each time that this one has written it."""

    def __init__(self, others):
        self.others = others

    def __set_name__(self, _, name):
        self.name = name

    def __get__(self, owner, _=None):
        return vars(owner).get("overwritten", ())

    def __set__(self, owner, value):
        vars(owner)["overwritten"] = self.others if value else value


def test_images_that_a_chain_does_not_take_come_at_once(monkeypatch):
    model, x = frozen("images"), batches("images")[0]
    run(model, x)
    (chain,) = chains_of(model)
    monkeypatch.setattr(Segment, "holds", lambda _, shape: shape[0] == 3)
    monkeypatch.setattr(ChainRun, "_held", Overwritten(("another's", False)), raising=False)
    vars(chain).pop("_held")
    assert chain._takes(x)


def test_many_sizes_of_values_come_at_once(monkeypatch):
    model, x = frozen("tokens"), batches("tokens")[0]
    expected = run(model, x)

    class Cleared(dict):  # by another thread, each time
        def __setitem__(self, key, value):
            pass

    chains = chains_of(model)
    assert chains
    for chain in chains:
        chain._segments = Cleared()
    torch.testing.assert_close(run(model, x), expected, rtol=0, atol=0)


def test_numbers_that_others_draw_while_a_model_is_traced_stay():
    Draws.drawn = []
    torch.manual_seed(3)
    model = frozen_model(Draws, batches("images")[2])
    assert isinstance(model.forward, Fused)
    run(model, batches("images")[0])
    assert not model.forward._modes[False].why_not()
    assert len({*Draws.drawn}) == len(Draws.drawn) > 3
