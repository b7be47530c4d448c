"""`outrider doctor`: looks at a deployment, and says what to mend.

It asks orchestrators what they see of their store and workers, since nobody else may reach those,
and looks at the rest from where it runs. Exit status: 0 all is well; 1 something is worth a look,
or could not be looked at; 2 something fails.
"""

import argparse
from dataclasses import replace

from rich.console import Console

from outrider.cli import options
from outrider.cli.doctor_checks import judge
from outrider.cli.doctor_look import StoreTls, look
from outrider.cli.doctor_values import exit_status
from outrider.cli.doctor_view import as_json, show
from outrider.errors import InvalidArgument
from outrider.trips import DEFAULT_SAMPLES, MAX_SAMPLES

_FILE_WIDTH = 160
"""Characters of a line where there is no terminal to fit."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check a deployment and say what to mend",
        epilog="exit status: 0 all is well; 1 something is worth a look, or could not be looked "
        "at; 2 something fails",
    )
    parser.add_argument(
        "address", metavar="HOST:PORT", help="orchestrators, with commas between them"
    )
    group = parser.add_argument_group("orchestrators")
    options.add_credentials(group)
    group.add_argument(
        "--server-name",
        default="",
        metavar="NAME",
        help="name that their certificates have, where that is not the address (port-forward)",
    )
    stores = parser.add_argument_group(
        "stores (seen from here, besides what orchestrators and workers see)"
    )
    stores.add_argument("--redis-url", default="", metavar="URL", help="session store")
    stores.add_argument(
        "--redis-password-file", default="", metavar="FILE", help="password of its user"
    )
    stores.add_argument("--kv-store-url", default="", metavar="URL", help="store of KV blocks")
    stores.add_argument("--redis-ca-file", default="", metavar="PEM", help="CA of both")
    stores.add_argument("--redis-cert-file", default="", metavar="PEM", help="client certificate")
    stores.add_argument("--redis-key-file", default="", metavar="PEM", help="its key")
    parser.add_argument(
        "--samples",
        type=_samples,
        default=DEFAULT_SAMPLES,
        metavar="N",
        help=f"trips measured on each way, at most {MAX_SAMPLES}; default: %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="print an object of JSON")
    parser.set_defaults(run=run)


async def run(args: argparse.Namespace) -> int:
    addresses = options.split_addresses(args.address)
    if not addresses:
        raise InvalidArgument("is empty", field="address")
    report = await look(
        addresses,
        replace(options.security(args), server_name=args.server_name),
        samples=args.samples,
        redis_url=args.redis_url,
        redis_password_file=args.redis_password_file,
        kv_store_url=args.kv_store_url,
        store_tls=StoreTls(args.redis_ca_file, args.redis_cert_file, args.redis_key_file),
    )
    checks = judge(report)
    if args.json:
        print(as_json(checks))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = _FILE_WIDTH
        show(checks, console)
    return exit_status(checks)


def _samples(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_SAMPLES:
        raise argparse.ArgumentTypeError(f"{text} is not in [1, {MAX_SAMPLES}]")
    return value
