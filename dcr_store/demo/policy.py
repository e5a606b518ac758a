"""A small Llama as transformers has it: made, saved and loaded as any other, sampled from, fingerprinted.

Checkpoints are BF16. What computes is float32, which holds every BF16 number: not every processor is fast at BF16.

Refuses to start without the packages of the extra ``demo``, with the command that installs them.
"""

from __future__ import annotations

import copy
import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcr_store.demo.recipe import Recipe
from dcr_store.demo.task import START, VOCABULARY, Ints
from dcr_store.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

Model = Any  # LlamaForCausalLM; transformers may be missing where types are checked


def require_packages() -> None:
    """Look for the packages of the extra ``demo``, without importing them.

    Raises
    ------
    InvalidInputError
        If one is missing.
    """
    for package in ("torch", "transformers", "safetensors", "aiohttp"):
        if find_spec(package) is None:
            raise InvalidInputError(
                f"the demo needs the package {package}; install it with: pip install 'dcr-store[demo]'"
            )


def prepare() -> None:
    """Import the packages, let torch compute in one thread, so that it always sums in one order; silence progress."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def make_policy(recipe: Recipe) -> Model:
    """Return a randomly initialised model, float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(recipe.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=recipe.hidden,
            intermediate_size=recipe.intermediate,
            num_hidden_layers=recipe.n_layers,
            num_attention_heads=recipe.n_heads,
            num_key_value_heads=recipe.n_kv_heads,
            max_position_embeddings=64,
            initializer_range=recipe.initial_std,
            bos_token_id=VOCABULARY.index(START),
            eos_token_id=None,
            pad_token_id=None,
            tie_word_embeddings=False,
        )
    )


def save(model: Model, directory: Path) -> None:
    """Write the model, rounded to BF16, and its tokenizer as a Hugging Face checkpoint."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=START))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=characters, bos_token=START).save_pretrained(directory)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(directory)


def load(directory: Path) -> Model:
    """Return the model of a checkpoint, float32 with exactly the checkpoint's weights, for inference."""
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def sample(model: Model, prompts: Ints, n_tokens: int, seed: int) -> Ints:
    """Return what the model continues with.

    Parameters
    ----------
    prompts : ndarray of int64, shape (n, k)

    Returns
    -------
    ndarray of int64, shape (n, n_tokens)
        Sampled from the model's own distribution (temperature 1, nothing cut off).
    """
    import torch

    torch.manual_seed(seed)
    tokens = torch.from_numpy(prompts)
    whole = model.generate(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=n_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=VOCABULARY.index(START),
    )
    return _as_ints(whole[:, tokens.shape[1] :])


def _as_ints(tokens: torch.Tensor) -> Ints:
    return tokens.numpy().copy()


def fingerprint(model: Model, directory: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a checkpoint and of every tensor of the model loaded from it.

    Tensors are named ``tensor:NAME`` and hashed as dtype, shape and bits, so that -0.0 and NaN payloads count.
    """
    import torch

    found = {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
        if path.is_file()
    }
    for name, tensor in model.state_dict().items():
        hashed = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        hashed.update(tensor.detach().contiguous().view(torch.uint8).numpy())
        found[f"tensor:{name}"] = hashed.hexdigest()
    return found
