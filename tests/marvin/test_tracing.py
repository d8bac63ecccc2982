"""Traces while other threads run models."""

import threading

import torch
from torch import nn

from marvin.tracing import Tracer


class Waiting(nn.Module):
    """Waits in the middle of its forward, so that others run then."""

    def __init__(self, meanwhile):
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.meanwhile = meanwhile

    def forward(self, x):
        x = self.before(x)
        self.meanwhile()
        return self.after(x)


def in_a_thread(work):
    found = []

    def keep():
        try:
            found.append(work())
        except Exception as error:  # given back to the test
            found.append(error)

    thread = threading.Thread(target=keep)
    thread.start()
    thread.join()
    return found[0]


def test_another_thread_runs_models_during_a_trace():
    other = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.randn(2, 4)
    seen = []
    shared = Waiting(lambda: None)

    def meanwhile():
        seen.append(in_a_thread(lambda: other(x)))
        seen.append(in_a_thread(lambda: shared.before.weight))

    shared.meanwhile = meanwhile
    graph = Tracer().trace(shared)
    assert torch.equal(seen[0], other(x))
    assert seen[1] is shared.before.weight
    assert [n.target for n in graph.nodes if n.op == "call_module"] == ["before", "after"]


def test_two_threads_trace_one_after_the_other():
    call = nn.Module.__call__
    inside, apart = threading.Event(), []

    def meanwhile():
        inside.set()
        thread.join(0.2)  # has to wait until this trace is done
        apart.append(thread.is_alive())

    def trace_another():
        inside.wait()
        Tracer().trace(Waiting(lambda: None))

    thread = threading.Thread(target=trace_another)
    thread.start()
    Tracer().trace(Waiting(meanwhile))
    thread.join()
    assert apart == [True]
    assert nn.Module.__call__ is call


def test_what_one_trace_read_can_be_asked_while_another_runs():
    tracer, layer = Tracer(), nn.Linear(4, 4)
    tracer.trace(nn.Sequential(layer))
    asked = []

    def ask():
        asked.extend(tracer.reads.may_have(layer, name) for name in ("training", "out_features"))

    alone = [tracer.reads.may_have(layer, name) for name in ("training", "out_features")]
    Tracer().trace(Waiting(ask))
    assert asked == alone
    assert False in alone
