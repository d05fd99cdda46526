"""The exception tree: every way Picaflor refuses has a name here.

Knows nothing of the rest of the package. A message names the thing, the value, where it was found and what would
have been accepted; the command line prints it as one line.

    PicaflorError                  exit 1
    ├── BadContainer               a model file breaks the container's rules
    │   └── MissingTensor          a tensor that the model needs is in no shard
    ├── UnknownFormat              a weight format by a name or a size that nothing here decodes
    ├── AmbiguousFormat            sizes that two formats share and no rule or stamp tells apart
    ├── UnsupportedConfig          a config value that changes the function and that we do not compute
    ├── UnsupportedKernel          no backend cell for (operation, format)
    ├── OutOfBudget                does not fit the memory that was granted
    ├── ReadFailed                 the disk gave an error or fewer bytes than the header promised
    ├── WriteFailed                the disk refused what was to be written, or is full
    ├── ContextExceeded            more tokens than the context holds
    ├── NoFiniteLogit              the model computed nothing but NaN and infinity
    ├── BadTokenizer               tokenizer.json missing or not usable
    ├── BadTemplate                the chat template raised or is malformed
    ├── BadStateFile               recorded routes or a usage history that cannot be used
    └── UsageError                 a wrong option or argument: exit 2
"""

from __future__ import annotations


class PicaflorError(Exception):
    """Base of all refusals. `exit_code` is what the command line returns."""

    exit_code = 1


class BadContainer(PicaflorError):
    """A model file breaks the container's rules (container.md sections 2, 5 and 8)."""


class MissingTensor(BadContainer):
    """A tensor that the model needs is in no shard."""


class UnknownFormat(PicaflorError):
    """A weight format by a name or a size that nothing here decodes."""


class AmbiguousFormat(PicaflorError):
    """Sizes that two formats share, with no rule or stamp to tell them apart."""


class UnsupportedConfig(PicaflorError):
    """A config value that changes the function and that we do not compute."""


class UnsupportedKernel(PicaflorError):
    """No backend cell for this (operation, format)."""


class OutOfBudget(PicaflorError):
    """Does not fit the memory that was granted."""


class ReadFailed(PicaflorError):
    """The disk gave an error, or fewer bytes than the header promised."""


class WriteFailed(PicaflorError):
    """The disk refused what was to be written, or is full."""


class ContextExceeded(PicaflorError):
    """More tokens than the context holds."""


class NoFiniteLogit(PicaflorError):
    """The model computed nothing but NaN and infinity for a token."""


class BadTokenizer(PicaflorError):
    """tokenizer.json is missing or not usable."""


class BadTemplate(PicaflorError):
    """The chat template raised or is malformed."""


class BadStateFile(PicaflorError):
    """Recorded routes or a usage history that cannot be used."""


class UsageError(PicaflorError):
    """A wrong option or argument."""

    exit_code = 2
