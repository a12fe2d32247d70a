"""Text to tokens and back: a tiktoken vocabulary by name, or plain bytes.

"bytes" is built here and needs no download: token i is byte i, and 256 is <|endoftext|>. Other
names ("gpt2", "cl100k_base", …) are tiktoken's own. `token_bytes` says how much text a token stands
for, so that losses per token of different vocabularies compare as bits per byte.
"""

import functools

import numpy as np
import tiktoken

from modelconfig import nearest


@functools.cache
def get_encoding(name: str) -> tiktoken.Encoding:
    """The vocabulary of that name: `encode_ordinary` for text, `eot_token` to end a document."""
    if name == "bytes":
        return tiktoken.Encoding(
            name,
            # Without merges any cut will do; short pieces keep the cost linear in the text.
            pat_str=r"(?s).{1,64}",
            mergeable_ranks={bytes([byte]): byte for byte in range(256)},
            special_tokens={"<|endoftext|>": 256},
        )
    known = ["bytes", *tiktoken.list_encoding_names()]
    if name not in known:
        raise ValueError(
            f"encoding {name!r} is not known; the nearest is {nearest(name, known)!r} "
            f"of {', '.join(known)}."
        )
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:
        raise ValueError(
            f"the vocabulary of encoding {name!r} could not be downloaded or stored "
            f"({type(error).__name__}); run this once with internet access, or set "
            "TIKTOKEN_CACHE_DIR to a tiktoken cache folder copied from a machine that has it, "
            "or use the encoding 'bytes', which needs no download."
        ) from error


def token_bytes(encoding: tiktoken.Encoding) -> np.ndarray:
    """How many bytes of UTF-8 text each token stands for; 0 for special and unused tokens."""
    sizes = np.zeros(encoding.n_vocab, dtype=np.int64)
    for piece in encoding.token_byte_values():
        sizes[encoding.encode_single_token(piece)] = len(piece)
    return sizes
