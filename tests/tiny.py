"""Tiny models for tests: a few layers of Llama with random weights and a byte tokenizer.

The weights are scaled so that attention matters and the next token is neither certain nor
arbitrary. A draft is the target with noise on its weights: the more noise, the fewer guesses
are accepted, and wrong KV shows at once.
"""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = "<|im_end|>"
SPECIALS = ("<|im_start|>", EOS)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(*, extra: tuple[str, ...] = ()) -> Tokenizer:
    """One token a byte, then the special tokens; `extra` makes another vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate((*alphabet, *extra))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return tokenizer


def make_model(
    folder: Path,
    *,
    seed: int = 0,
    noise: float = 0.0,
    sharpness: float = 4.0,
    context_length: int = 512,
    padded_vocab: int = 0,
    extra_tokens: tuple[str, ...] = (),
) -> Path:
    """Write a model folder of `transformers`.

    Equal seeds give equal weights; `noise` (relative) is then added to all but the embeddings.
    `padded_vocab` makes the output head larger than the tokenizer, as some models have it.
    """
    tokenizer = make_tokenizer(extra=extra_tokens)
    size = tokenizer.get_vocab_size()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=max(size, padded_vocab),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=context_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2:
                continue
            scale = 1.0 if "embed" in name else sharpness if "lm_head" in name else 3.0
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale * 0.125)
        # Random weights are as likely to end as to go on; a text of some length is more use.
        model.lm_head.weight[size - len(SPECIALS) :] *= 0.1
        noise_generator = torch.Generator().manual_seed(2000 + seed)
        for name, weight in model.named_parameters():
            if noise and weight.ndim == 2 and "embed" not in name:
                change = torch.randn(weight.shape, generator=noise_generator)
                weight.add_(change * weight.std() * noise)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id)
    model.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(folder)
    return folder
