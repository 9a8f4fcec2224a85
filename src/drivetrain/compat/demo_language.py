"""Lightning's ``demos.transformer`` and ``demos.lstm``: two small language models, and WikiText-2 for them.

Submodules have the names of Lightning's models, so Lightning's checkpoints can be loaded. They are created in
Lightning's order, so a seed gives the same initial weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from drivetrain.errors import WrongTypeError
from drivetrain.module.module import LightningModule

_WORDS = 33278  # the number of different words in WikiText-2, with <eos>
_URL = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/train.txt"
_END_OF_LINE = "<eos>"

# ---- text ------------------------------------------------------------------------------------------------------------


class Dictionary:
    """A dictionary that gives each new word the next number.

    Attributes:
        word2idx: the number of each word.
        idx2word: the word of each number.
    """

    def __init__(self) -> None:
        self.word2idx: dict[str, int] = {}
        self.idx2word: list[str] = []

    def add_word(self, word: str) -> int:
        """Return the number of ``word``; a new word gets the next number."""
        number = self.word2idx.setdefault(word, len(self.idx2word))
        if number == len(self.idx2word):
            self.idx2word.append(word)
        return number

    def __len__(self) -> int:
        return len(self.idx2word)


def tokenize(path: str | Path) -> tuple[Tensor, Dictionary]:
    """Return the words of a text as a tensor of numbers, of shape ``(words,)``, and the :class:`Dictionary`. The word
    ``<eos>`` ends each line.
    """
    dictionary = Dictionary()
    with open(path, encoding="utf-8") as lines:
        numbers = [dictionary.add_word(word) for line in lines for word in (*line.split(), _END_OF_LINE)]
    return torch.tensor(numbers, dtype=torch.int64), dictionary


class WikiText2(Dataset[tuple[Tensor, Tensor]]):
    """WikiText-2 in blocks of words. A sample is a block, and the block that starts one word later.

    Args:
        data_dir: the folder of ``wikitext-2.txt``.
        block_size: words in a block.
        download: download the file if it is missing.

    Raises:
        WrongTypeError: ``data_dir`` is not a path.
        FileNotFoundError: the file is missing, and ``download`` is False.
    """

    def __init__(self, data_dir: Path = Path("./data"), block_size: int = 35, download: bool = True) -> None:
        if not isinstance(data_dir, (str, Path)):
            raise WrongTypeError(f"WikiText2(data_dir={data_dir!r}): pass the path of a folder, such as Path('data').")
        self.path = Path(data_dir) / "wikitext-2.txt"
        self.block_size = block_size
        if download:
            self.download(self.path)
        self.data, self.dictionary = tokenize(self.path)

    @property
    def vocab_size(self) -> int:
        """The number of different words."""
        return len(self.dictionary)

    def __len__(self) -> int:
        return len(self.data) // self.block_size - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = self.data[index * self.block_size :][: self.block_size + 1]
        return words[:-1], words[1:]

    @staticmethod
    def download(destination: Path) -> None:
        """Download the text from the repository of PyTorch's examples, unless the file exists."""
        if not destination.exists():
            destination.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(_URL, str(destination), progress=False)


class SequenceSampler(Sampler[list[int]]):
    """Yields batches of indices for a recurrent model. Sample ``i`` of a batch continues the text of sample ``i`` of
    the batch before.

    Args:
        dataset: a dataset of consecutive samples.
        batch_size: the number of samples per batch. The dataset is cut into this many parts, and each batch takes one
            sample from each part.
    """

    def __init__(self, dataset: Sized, batch_size: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.chunk_size = len(dataset) // batch_size

    def __iter__(self) -> Iterator[list[int]]:
        starts = [part * self.chunk_size for part in range(self.batch_size)]
        return ([start + offset for start in starts] for offset in range(self.chunk_size))

    def __len__(self) -> int:
        return self.chunk_size


# ---- the transformer -------------------------------------------------------------------------------------------------


class PositionalEncoding(nn.Module):
    """Adds a positional encoding of sines and cosines, then applies dropout.

    Args:
        dim: number of features, even.
        dropout: the dropout probability.
        max_len: the largest allowed number of words in a sample.
    """

    def __init__(self, dim: int, dropout: float = 0.1, max_len: int = 5000) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        self.dim = dim
        self.max_len = max_len
        self.pe: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, of shape ``(batch, length, dim)``, with the encoding added."""
        if self.pe is None:
            self.pe = self._encodings(x.device)
        # Every word gets the encoding of position x.size(1). Lightning does this, too, and results must agree.
        return self.dropout(x + self.pe[:, x.size(1)])

    def _encodings(self, device: torch.device) -> Tensor:
        """Return the encoding of every position, of shape ``(1, max_len, dim)``."""
        positions = torch.arange(self.max_len, dtype=torch.float, device=device)
        rates = torch.exp(torch.arange(0, self.dim, 2, device=device).float() * (-math.log(10000.0) / self.dim))
        angles = positions[:, None] * rates
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[None]


class Transformer(nn.Module):
    """An encoder and a decoder that predict the next words.

    Args:
        vocab_size: the number of words.
        ninp: features of a word.
        nhead: heads of the attention.
        nhid: features inside the feed-forward layers.
        nlayers: number of layers in the encoder, and in the decoder.
        dropout: the dropout probability.
    """

    def __init__(
        self,
        vocab_size: int = _WORDS,
        ninp: int = 200,
        nhead: int = 2,
        nhid: int = 200,
        nlayers: int = 2,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.pos_encoder = PositionalEncoding(ninp, dropout)
        self.embedding = nn.Embedding(vocab_size, ninp)
        self.transformer = nn.Transformer(ninp, nhead, nlayers, nlayers, nhid, dropout, batch_first=True)
        self.decoder = nn.Linear(ninp, vocab_size)
        self.ninp = ninp
        self.vocab_size = vocab_size
        self.src_mask: Tensor | None = None

    def generate_square_subsequent_mask(self, size: int) -> Tensor:
        """Return a mask of shape ``(size, size)``: 0 for a word and the words before, minus infinity for the words
        after.
        """
        return torch.full((size, size), -math.inf).triu(diagonal=1)

    def forward(self, inputs: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return log-probabilities, of shape ``(batch * length, vocab_size)``.

        Args:
            inputs: words, of shape ``(batch, length)``.
            target: the next words.
            mask: the mask for ``target``; ``None``: each word sees only itself and earlier words.
        """
        length = inputs.size(1)
        if self.src_mask is None or len(self.src_mask) != length:
            self.src_mask = self.generate_square_subsequent_mask(length).to(inputs.device)
        if mask is None:
            mask = self.generate_square_subsequent_mask(length).to(inputs.device)
        source, following = (self.pos_encoder(self.embedding(x) * math.sqrt(self.ninp)) for x in (inputs, target))
        scores: Tensor = self.decoder(self.transformer(source, following, tgt_mask=mask))
        return F.log_softmax(scores, dim=-1).view(-1, self.vocab_size)


class _Reads(LightningModule):
    """Base class of the modules that train on WikiText-2."""

    def prepare_data(self) -> None:
        WikiText2(download=True)


class LightningTransformer(_Reads):
    """:class:`Transformer`, trained by SGD."""

    def __init__(self, vocab_size: int = _WORDS) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=vocab_size)

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        return self.model(inputs, target)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, target = batch
        return F.nll_loss(self(inputs, target), target.view(-1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(WikiText2())


# ---- the recurrent model ---------------------------------------------------------------------------------------------


class SimpleLSTM(nn.Module):
    """A recurrent model that predicts the next word.

    Args:
        vocab_size: the number of words.
        ninp: features of a word.
        nhid: features of the hidden state.
        nlayers: number of recurrent layers.
        dropout: the dropout probability.
    """

    def __init__(
        self, vocab_size: int = _WORDS, ninp: int = 512, nhid: int = 512, nlayers: int = 4, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(vocab_size, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout, batch_first=True)
        self.decoder = nn.Linear(nhid, vocab_size)
        self.vocab_size, self.nlayers, self.nhid = vocab_size, nlayers, nhid
        self.init_weights()

    def init_weights(self) -> None:
        """Draw random weights for the input embedding and the output layer. Set the output layer's bias to 0."""
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, input: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return log-probabilities, of shape ``(batch * length, vocab_size)``, and the next hidden state.

        Args:
            input: words, of shape ``(batch, length)``.
            hidden: the hidden state, from :meth:`init_hidden`.
        """
        features, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        scores: Tensor = self.decoder(self.drop(features))
        return F.log_softmax(scores.view(-1, self.vocab_size), dim=1), hidden

    def init_hidden(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Return the hidden state before the first word: two tensors of zeros ``(nlayers, batch_size, nhid)``."""
        shape = (self.nlayers, batch_size, self.nhid)
        return self.decoder.weight.new_zeros(shape), self.decoder.weight.new_zeros(shape)


class LightningLSTM(_Reads):
    """:class:`SimpleLSTM`, trained by SGD; the hidden state is kept from one batch of an epoch to the next."""

    def __init__(self, vocab_size: int = _WORDS) -> None:
        super().__init__()
        self.model = SimpleLSTM(vocab_size=vocab_size)
        self.hidden: tuple[Tensor, Tensor] | None = None

    def on_train_epoch_end(self) -> None:
        self.hidden = None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, target = batch
        state, cell = self.hidden or self.model.init_hidden(inputs.size(0))
        scores, self.hidden = self.model(inputs, (state.detach(), cell.detach()))
        loss = F.nll_loss(scores, target.view(-1))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=20.0)

    def train_dataloader(self) -> Any:
        dataset = WikiText2()
        return DataLoader(dataset, batch_sampler=SequenceSampler(dataset, batch_size=20))
