"""The language models train, on a text in the place of the one that they download."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Trainer
from drivetrain.compat import demo_language
from drivetrain.compat.demo_language import (
    Dictionary,
    LightningLSTM,
    LightningTransformer,
    PositionalEncoding,
    SequenceSampler,
    SimpleLSTM,
    Transformer,
    WikiText2,
    tokenize,
)

TEXT = "a b c d\n" * 40 + "e f\n"


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The text at the address of the download; the working folder is empty."""
    path = tmp_path / "host" / "train.txt"
    path.parent.mkdir()
    path.write_text(TEXT)
    monkeypatch.setattr(demo_language, "_URL", path.as_uri())
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    return path


def test_words_are_numbered_as_they_come(text: Path) -> None:
    words, dictionary = tokenize(text)
    assert dictionary.idx2word == ["a", "b", "c", "d", "<eos>", "e", "f"]
    assert words[:6].tolist() == [0, 1, 2, 3, 4, 0]
    assert (len(words), words.dtype, len(dictionary)) == (203, torch.int64, 7)
    again = Dictionary()
    assert [again.add_word(word) for word in ("x", "y", "x")] == [0, 1, 0]


def test_a_sample_is_a_block_and_the_words_after_each(text: Path) -> None:
    dataset = WikiText2(block_size=7)
    assert Path("data/wikitext-2.txt").read_text() == TEXT
    assert (len(dataset), dataset.vocab_size) == (28, 7)
    inputs, target = dataset[1]
    assert inputs.tolist() == [2, 3, 4, 0, 1, 2, 3]
    assert target.tolist() == [3, 4, 0, 1, 2, 3, 4]
    text.unlink()
    assert len(WikiText2()) == 4  # it is there
    with pytest.raises(FileNotFoundError):
        WikiText2(Path("elsewhere"), download=False)


def test_a_batch_continues_where_the_one_before_ended() -> None:
    sampler = SequenceSampler(range(11), batch_size=3)
    assert list(sampler) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert len(sampler) == 3


def test_every_position_gets_the_encoding_of_the_length() -> None:
    encoding = PositionalEncoding(4, dropout=0.0)
    x = torch.randn(2, 3, 4)
    added = [math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)]
    torch.testing.assert_close(encoding(x) - x, torch.tensor(added).expand(2, 3, 4))


def test_a_word_does_not_see_later_ones() -> None:
    model = Transformer(7, ninp=4, nhid=4).eval()
    target = torch.tensor([[0, 1, 2]])
    changed = torch.tensor([[0, 1, 5]])
    inputs = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        first, second = model(inputs, target), model(inputs, changed)
        unmasked = model(inputs, changed, torch.zeros(3, 3)), model(inputs, target, torch.zeros(3, 3))
    assert first.shape == (3, 7)
    torch.testing.assert_close(first.exp().sum(1), torch.ones(3))
    torch.testing.assert_close(first[:2], second[:2])
    assert not torch.allclose(unmasked[0][:2], unmasked[1][:2])  # the control


def test_the_hidden_state_carries_over() -> None:
    model = SimpleLSTM(7, 4, 5, 2, dropout=0.0)
    words = torch.tensor([[0, 1, 2, 3]])
    whole, _ = model(words, model.init_hidden(1))
    first, hidden = model(words[:, :2], model.init_hidden(1))
    second, _ = model(words[:, 2:], hidden)
    torch.testing.assert_close(torch.cat([first, second]), whole)
    assert model.decoder.bias.abs().sum() == 0
    assert model.encoder.weight.abs().max() <= 0.1


@pytest.mark.usefixtures("text")
@pytest.mark.parametrize("cls", [LightningTransformer, LightningLSTM])
@pytest.mark.filterwarnings("ignore:The training loader has few workers", "ignore:.*num_workers")
def test_a_model_trains_with_its_own_data(cls: Any) -> None:
    torch.manual_seed(1)
    model = cls(vocab_size=7)
    small: Any = Transformer if cls is LightningTransformer else SimpleLSTM
    model.model = small(7, 4, 2, 4, 1)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
    loader = None if cls is LightningTransformer else torch.utils.data.DataLoader(WikiText2(), batch_size=2)
    Trainer(accelerator="cpu", max_epochs=1, limit_train_batches=2, **quiet).fit(model, loader)
    assert any(not torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert getattr(model, "hidden", None) is None  # the epoch is over
