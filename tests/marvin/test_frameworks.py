"""Quantised models in the hands of Lightning and transformers, compared bit for bit."""

import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import marvin
from fixedpoint_kernels import FixedPoint

pytestmark = pytest.mark.filterwarnings("ignore")  # those packages' own


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def data():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=16)


@pytest.fixture
def lightning():
    return pytest.importorskip("lightning")


def classifier(lightning, seed=0):
    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(seed)
            self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
            marvin.prepare(self.model)
            self.tested = []

        def forward(self, x):
            return self.model(x)

        def configure_optimizers(self):
            optimizer = marvin.MSGD(self.named_parameters(), lr=0.05, lookback=(2, 5))
            marvin.quantize_activations(self.model, optimizer)
            return optimizer

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def test_step(self, batch, index):
            self.tested.append(self(batch[0]))

    return Classifier


def trainer(lightning, epochs, folder):
    return lightning.Trainer(
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def outputs(module):
    return module.eval()(data().dataset.tensors[0]).detach()


def test_lightning_stops_resumes_tests_and_loads(lightning, tmp_path):
    kind = classifier(lightning)
    whole, first = kind(), kind()
    trainer(lightning, 4, tmp_path).fit(whole, data())
    half = trainer(lightning, 2, tmp_path)
    half.fit(first, data())
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = classifier(lightning, seed=9)()
    trainer(lightning, 4, tmp_path).fit(resumed, data(), ckpt_path=tmp_path / "half.ckpt")
    same(dict(resumed.state_dict()), dict(whole.state_dict()))
    same(outputs(resumed), outputs(whole))
    loaded = classifier(lightning, seed=8).load_from_checkpoint(tmp_path / "half.ckpt")
    same(outputs(loaded), outputs(first))
    trainer(lightning, 1, tmp_path).test(first, data(), verbose=False)
    same(torch.cat(first.tested), outputs(first))


@dataclass(frozen=True)
class Bits(marvin.policies.PlainRecord):
    fmt: FixedPoint


@dataclass(frozen=True)
class Own(marvin.Policy):
    """A policy of one's own, as docs/own_policy.md has it."""

    def init(self, settings, shared):
        return Bits(FixedPoint(8, 6))


def test_lightning_trains_with_a_policy_of_ones_own(lightning, tmp_path):
    module = classifier(lightning)()
    adam = torch.optim.Adam(module.parameters())
    module.configure_optimizers = lambda: marvin.Quantized(adam, Own())
    own = trainer(lightning, 1, tmp_path)
    own.fit(module, data())
    assert {*own.optimizers[0].formats().values()} == {FixedPoint(8, 6)}


def test_lightning_fits_twice(lightning, tmp_path):
    """Each ``fit`` makes an optimizer of the weights there are, as a loop of one's own would."""
    module, own = classifier(lightning)(), classifier(lightning)()
    for again in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer(lightning, 2, tmp_path).fit(module, data())
        assert any("weights that MSGD has rounded" in str(w.message) for w in caught) == again
        optimizer = own.configure_optimizers()
        for batch in [*data(), *data()]:
            optimizer.zero_grad()
            loss = own.train().training_step(batch, 0)
            loss.backward()
            optimizer.step(loss=loss.detach())
        assert optimizer.trace
        same(dict(module.state_dict()), dict(own.state_dict()))
        same(outputs(module), outputs(own))
        module.train()  # Lightning leaves a module in eval mode as it is
    hooks = [len(m._forward_pre_hooks) for m in module.model.modules()]
    assert hooks == [1, 1, 0, 1]


def test_transformers_save_and_load(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.DistilBertConfig(
        vocab_size=50, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=16
    )

    class Quantised(transformers.DistilBertForSequenceClassification):
        def __init__(self, config):
            super().__init__(config)
            marvin.prepare(self)

    torch.manual_seed(0)
    model = Quantised(config)
    optimizer = marvin.MSGD(model.named_parameters(), lr=0.05, lookback=(2, 3))
    marvin.quantize_activations(model, optimizer)
    tokens = torch.randint(50, (4, 7), generator=torch.Generator().manual_seed(0))
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=torch.tensor([0, 1, 0, 1])).loss
        loss.backward()
        optimizer.step(loss=loss)
    assert len(optimizer.trace) >= 4
    wanted = model.eval()(input_ids=tokens).logits
    plain = transformers.DistilBertForSequenceClassification(config).eval()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "fixed_point" not in k})
    assert not torch.equal(plain(input_ids=tokens).logits, wanted)
    model.save_pretrained(tmp_path)
    loaded = Quantised.from_pretrained(tmp_path).eval()
    same(loaded(input_ids=tokens).logits, wanted)
