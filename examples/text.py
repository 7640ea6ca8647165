"""Text that programs train on, where nothing can be fetched: sources and prose of the packages that are installed, or
of the files and folders that you name. A tokenizer is trained on it, and every fiftieth document is held out.

    python -m examples.text --folder out/text --vocabulary 8192

prepares it, says how much there is, and keeps it in the folder, where other programs find it."""

import argparse
import hashlib
import os
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

SUFFIXES = frozenset("c cc cpp cu cuh h hpp md py pyi rst txt".split())
LARGEST = 1 << 20  # bytes of a file; larger ones are tables of data
HELD_OUT = 50  # one document of so many
SHORTEST_LINE = 20  # characters; shorter lines are everywhere, and say nothing about copies
SAMPLE = 60 << 20  # characters that the tokenizer is trained on
END = "<end>"  # of a document


@dataclass(frozen=True)
class Text:
    """Tokens of documents, each with END behind it."""

    tokenizer: Tokenizer
    train: Tensor  # (n,) int32
    held_out: Tensor  # (m,) int32

    @property
    def digest(self) -> str:
        """Names the tokens: a run goes on with the text that it began with, and with no other."""
        return hashlib.sha256(self.train.numpy().tobytes() + self.held_out.numpy().tobytes()).hexdigest()[:16]


def installed() -> list[Path]:
    """Folders of installed packages, of Python itself, and of the system's documentation."""
    packages = [Path(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return [*packages, Path(sysconfig.get_path("stdlib")), Path("/usr/include"), Path("/usr/share/doc")]


def files(roots: Iterable[Path]) -> Iterator[Path]:
    """Files of text below folders, in an order that depends on names alone; a file that is named is taken as it is."""
    for root in roots:
        if root.is_file():
            yield root
        for folder, inner, names in os.walk(root):
            inner.sort()
            found = (Path(folder, name) for name in sorted(names))
            texts = (path for path in found if path.suffix.removeprefix(".") in SUFFIXES)
            yield from (path for path in texts if path.is_file() and path.stat().st_size <= LARGEST)


def documents(roots: Iterable[Path], megabytes: float | None = None) -> list[str]:
    """Texts of files, at most so many megabytes. Left out are copies, files most of whose lines others have, and what
    is not UTF-8."""
    copies: set[bytes] = set()  # digests of files
    known: set[int] = set()  # hashes of lines
    kept, size = [], 0
    for path in files(roots):
        raw = path.read_bytes()
        digest = hashlib.sha256(raw).digest()
        if digest in copies:
            continue
        copies.add(digest)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            continue
        lines = {hash(line) for line in map(str.strip, text.splitlines()) if len(line) >= SHORTEST_LINE}
        new = lines - known
        if 2 * len(new) >= len(lines) and text.strip():
            known |= new
            kept.append(text)
            size += len(raw)
        if megabytes is not None and size > megabytes * 1e6:
            break
    return kept


def trained_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE of that many tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:  # (n,) int32
    """The tokens of all texts, one behind the other."""
    end, parts = tokenizer.token_to_id(END), [torch.empty(0, dtype=torch.int32)]
    for start in range(0, len(texts), 1000):
        for found in tokenizer.encode_batch_fast(texts[start : start + 1000]):
            parts.append(torch.tensor([*found.ids, end], dtype=torch.int32))
    return torch.cat(parts)


def prepare(
    folder: Path,
    *,
    roots: Sequence[Path] = (),  # of the text; by default `installed()`
    vocabulary: int = 8192,
    megabytes: float | None = None,
) -> Text:
    """The text that the folder keeps, or a new one, kept there."""
    tokens, words = folder / "tokens.pt", folder / "tokenizer.json"
    if not tokens.exists():
        texts = documents(roots or installed(), megabytes)
        if len(texts) < 2:
            raise ValueError(
                f"{len(texts)} documents to train on and to hold out, expected two or more; name more files"
            )
        every = max(1, sum(map(len, texts)) // SAMPLE)
        tokenizer = trained_tokenizer(texts[::every], vocabulary)
        held = [place % HELD_OUT == 0 for place in range(len(texts))]
        split = [[text for text, out in zip(texts, held, strict=True) if out == want] for want in (False, True)]
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(words))
        torch.save([encoded(tokenizer, part) for part in split], tokens)
    return Text(Tokenizer.from_file(str(words)), *torch.load(tokens))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument(
        "--text", type=Path, nargs="*", default=(), help="files and folders (default: what is installed)"
    )
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--megabytes", type=float, help="stop behind so much text (default: all of it)")
    args = parser.parse_args(argv)
    begin = time.perf_counter()
    text = prepare(args.folder, roots=args.text, vocabulary=args.vocabulary, megabytes=args.megabytes)
    print(f"{len(text.train):,} tokens to train on, {len(text.held_out):,} held out, digest {text.digest},")
    print(f"vocabulary of {text.tokenizer.get_vocab_size()}, {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
