"""Flags that several subcommands share, and the values that they stand for."""

import argparse
import os
from pathlib import Path

from outrider.cli.stack import StackConfig
from outrider.client import GenerationOptions
from outrider.rpc.channel import ChannelSecurity
from outrider.types import VerificationMode

DTYPES = ("auto", "float32", "bfloat16")
PROPOSERS = ("draft", "ngram", "auto")


def count(text: str) -> int:
    """A whole number of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def add_models(parser: argparse.ArgumentParser) -> None:
    """The models of a stack of one's own."""
    group = parser.add_argument_group("models (of a stack of its own)")
    kinds = "a hub id, a local folder, a GGUF file, or demo"
    group.add_argument("--target", default="demo", metavar="REF", help=f"target model: {kinds}")
    group.add_argument("--draft", default="demo", metavar="REF", help="draft model, likewise")
    group.add_argument("--dtype", default="auto", choices=DTYPES, help="default: %(default)s")
    group.add_argument("--threads", type=count, default=0, metavar="N", help="CPU threads a worker")
    group.add_argument("--drafts", type=count, default=1, metavar="N", help="draft workers")
    group.add_argument("--targets", type=positive, default=1, metavar="N", help="target workers")
    group.add_argument(
        "--orchestrators", type=positive, default=1, metavar="N", help="processes that callers meet"
    )
    group.add_argument("--store-url", default="", metavar="URL", help="a Redis instead of our own")
    group.add_argument("--log-dir", type=Path, metavar="DIR", help="keep the logs of the processes")


def stack_config(args: argparse.Namespace) -> StackConfig:
    return StackConfig(
        target=args.target,
        draft=args.draft,
        num_targets=args.targets,
        num_drafts=args.drafts,
        num_orchestrators=args.orchestrators,
        dtype=args.dtype,
        threads=args.threads,
        store_url=args.store_url,
        log_dir=args.log_dir,
    )


def add_connection(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Where the server is; `required`: a stack of one's own would not do."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--address",
        default="",
        required=required,
        metavar="HOST:PORT",
        help="one, or several of equal rights with commas between them; a resolver's as "
        "dns:///name:port" + ("" if required else "; default: a stack of its own"),
    )
    add_credentials(group)
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="deadline of a call"
    )


def add_credentials(group: "argparse._ArgumentGroup") -> None:
    """How the server proves who it is, and the caller to it."""
    group.add_argument("--ca-file", default="", metavar="PEM", help="verify the server; TLS on")
    group.add_argument("--cert-file", default="", metavar="PEM", help="client certificate")
    group.add_argument("--key-file", default="", metavar="PEM", help="key of the certificate")
    group.add_argument("--token-file", default="", metavar="FILE", help="bearer token")


def addresses(args: argparse.Namespace) -> list[str]:
    """Those that --address names."""
    return split_addresses(args.address)


def split_addresses(text: str) -> list[str]:
    """Addresses with commas between them; a resolver's may have commas of its own."""
    scheme = text.partition(":")[0]
    return [text] if scheme in ("dns", "ipv4", "ipv6") else [a for a in text.split(",") if a]


def security(args: argparse.Namespace) -> ChannelSecurity:
    return ChannelSecurity(
        ca_file=os.path.expanduser(args.ca_file),
        cert_file=os.path.expanduser(args.cert_file),
        key_file=os.path.expanduser(args.key_file),
        token_file=os.path.expanduser(args.token_file),
    )


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int | None = None) -> None:
    """How tokens are drawn. Ranges are the server's to check: it names the field."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N")
    group.add_argument("--temperature", type=float, metavar="T", help="default: 0, the argmax")
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K most likely tokens")
    group.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest P of the mass")
    group.add_argument("--min-p", type=float, metavar="P", help="relative to the most likely")
    group.add_argument("--seed", type=int, metavar="N", help="default: drawn by the server")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the end of text")


def add_speculation(parser: argparse.ArgumentParser) -> None:
    """How the generation is sped up."""
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--k", type=int, metavar="K", help="guesses a round, 0 to 16; 0: off; default: what pays"
    )
    group.add_argument(
        "--max-k", type=int, metavar="K", help="guesses a round at most, where --k is left out"
    )
    group.add_argument("--mode", choices=[mode.value for mode in VerificationMode])
    group.add_argument("--proposer", default="", choices=PROPOSERS)
    group.add_argument(
        "--fan-out", type=int, metavar="N", help="outcomes prepared for ahead, 0 to 64; 0: none"
    )
    group.add_argument(
        "--alternatives",
        type=int,
        metavar="N",
        help="next-best guesses verified beside each guess, 0 to 3",
    )


def generation_options(args: argparse.Namespace) -> GenerationOptions:
    """What the flags of `add_sampling` and `add_speculation` say."""
    return GenerationOptions(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
        num_speculative_tokens=args.k,
        max_speculative_tokens=args.max_k,
        mode=VerificationMode(args.mode) if args.mode else None,
        proposer=args.proposer,
        fan_out=args.fan_out,
        alternatives=args.alternatives,
        stop_strings=tuple(getattr(args, "stop", None) or ()),
        logprobs=getattr(args, "logprobs", None),
    )
