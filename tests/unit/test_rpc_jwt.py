"""Callers by JSON Web Tokens, against real keys, files and an HTTPS server."""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import http.server
import json
import ssl
import threading
import time

import grpc
import grpc.aio
import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from certificates import cert_pem, certificate, pem
from outrider.errors import InvalidArgument, Unauthenticated, Unavailable
from outrider.rpc import files as files_module
from outrider.rpc import key_sets
from outrider.rpc.auth import Authenticator, Caller, current_caller
from outrider.rpc.channel import open_channel
from outrider.rpc.jwt_tokens import JwtSettings, JwtVerifier
from outrider.rpc.key_sets import FetchedKeys, fetch_https, parse_key_set
from outrider.rpc.server import Server, ServerConfig
from outrider.rpc.tokens import StaticTokens

ISSUER, AUDIENCE = "https://issuer.test", "outrider"
RSA_KEYS = [rsa.generate_private_key(65537, 2048) for _ in range(3)]
EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()
TIMEOUT_S = 10.0


def jwk(key, kid, **members):
    maker = {
        rsa.RSAPrivateKey: RSAAlgorithm,
        ec.EllipticCurvePrivateKey: ECAlgorithm,
        ed25519.Ed25519PrivateKey: OKPAlgorithm,
    }
    algorithm = next(maker[kind] for kind in maker if isinstance(key, kind))
    return algorithm.to_jwk(key.public_key(), as_dict=True) | {"kid": kid} | members


def key_set(*keys):
    return json.dumps({"keys": list(keys)}).encode()


def token(key=RSA_KEYS[0], kid="one", algorithm="RS256", headers=(), drop=(), **claims):
    now = int(time.time())
    body = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "iat": now, "exp": now + 60} | claims
    body = {name: value for name, value in body.items() if name not in drop}
    extra = {"kid": kid} if kid is not None else {}
    return jwt.encode(body, key, algorithm, headers=extra | dict(headers))


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys.json"
    path.write_bytes(
        key_set(
            jwk(RSA_KEYS[0], "one", use="sig"), jwk(EC_KEY, "ec", alg="ES256"), jwk(ED_KEY, "ed")
        )
    )
    return path


def verifier(keys, **settings):
    return JwtVerifier(JwtSettings(str(keys), ISSUER, AUDIENCE, **settings))


def now(seconds):
    return int(time.time() + seconds)


# --- which tokens are good --------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        lambda: token(),
        lambda: token(EC_KEY, "ec", "ES256"),
        lambda: token(aud=["other", AUDIENCE]),
        lambda: token(exp=now(-20)),  # within the leeway, as are the next two
        lambda: token(nbf=now(20)),
        lambda: token(iat=now(20)),
        lambda: token(drop=("iat",)),
    ],
)
async def test_good_tokens_tell_tenant_and_subject(keys, given):
    assert await verifier(keys).claims(given()) == ("alice", "alice")


async def test_the_claim_that_names_the_tenant_is_a_setting(keys):
    tenant = verifier(keys, tenant_claim="org")
    assert await tenant.claims(token(org="acme")) == ("acme", "alice")
    for wrong in ("", 7, ["acme"], "a\nb", "x" * 129, None):
        with pytest.raises(Unauthenticated, match="'org'"):
            await tenant.claims(token(org=wrong))
    with pytest.raises(Unauthenticated, match="'org'"):
        await tenant.claims(token())


def unsigned():
    return jwt.encode(
        {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": now(60)},
        None,
        "none",
        headers={"kid": "one"},
    )


def signed_by_public_key():
    """HS256 with the public key as its secret: what a verifier falls for that believes `alg`."""
    public = (
        RSA_KEYS[0]
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )

    def part(value):
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=")

    body = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": now(60)}
    signed = part({"alg": "HS256", "typ": "JWT", "kid": "one"}) + b"." + part(body)
    mac = hmac.new(public, signed, hashlib.sha256).digest()
    return (signed + b"." + base64.urlsafe_b64encode(mac).rstrip(b"=")).decode()


def nested():
    header = base64.urlsafe_b64encode(b"[" * 3000 + b"]" * 3000).decode().rstrip("=")
    return f"{header}.e30.c2ln"[:8192]


BAD = {
    "expired": (lambda: token(exp=now(-60)), "expired"),
    "not valid yet": (lambda: token(nbf=now(60)), "not valid yet"),
    "issued in the future": (lambda: token(iat=now(60)), "not valid yet"),
    "for ever": (lambda: token(drop=("exp",)), "claim exp"),
    "another issuer": (lambda: token(iss="https://evil.test"), "another issuer"),
    "no issuer": (lambda: token(drop=("iss",)), "claim iss"),
    "another audience": (lambda: token(aud="bank"), "another audience"),
    "no audience": (lambda: token(drop=("aud",)), "claim aud"),
    "another's signature": (lambda: token(RSA_KEYS[1]), "wrong signature"),
    "a key for another algorithm": (lambda: token(EC_KEY, "one", "ES256"), "does not have"),
    "alg none": (unsigned, "not allowed"),
    "HS256 by the public key": (signed_by_public_key, "not allowed"),
    "an algorithm that is not allowed": (lambda: token(ED_KEY, "ed", "EdDSA"), "not allowed"),
    "RS512": (lambda: token(algorithm="RS512"), "not allowed"),
    "an unknown key": (lambda: token(RSA_KEYS[1], "two"), "does not have"),
    "no key named where there are several": (lambda: token(kid=None), "does not have"),
    "an extension that must be understood": (
        lambda: token(headers={"crit": ["exp-2"], "exp-2": 1}),
        "nor a valid",
    ),
    "no token": (lambda: "hello", "nor a valid"),
    "a nested header": (nested, "nor a valid"),
    "a long one": (lambda: token(filler="x" * 9000), "longer than 8192"),
    "exp infinite": (lambda: token(exp=float("inf")), "nor a valid"),
    "a subject that is no text": (lambda: token(sub=7), "nor a valid"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_tokens_are_refused_with_the_reason_and_never_quoted(keys, name):
    make, reason = BAD[name]
    given = make()
    with pytest.raises(Unauthenticated) as refused:
        await verifier(keys).claims(given)
    assert reason in refused.value.message
    assert refused.value.__cause__ is None and given not in str(refused.value)


async def test_tampered_tokens_are_refused(keys):
    head, body, signature = token().split(".")
    other = token(sub="mallory").split(".")[1]
    for parts in ((head, other, signature), (head, body, ""), (head, body, signature[:-4])):
        with pytest.raises(Unauthenticated):
            await verifier(keys).claims(".".join(parts))


async def test_allowed_algorithms_are_a_setting(keys):
    assert await verifier(keys, algorithms=("EdDSA",)).claims(token(ED_KEY, "ed", "EdDSA"))
    with pytest.raises(Unauthenticated, match="not allowed"):
        await verifier(keys, algorithms=("EdDSA",)).claims(token())


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"algorithms": ("HS256",)}, "jwt_algorithms"),
        ({"algorithms": ("none",)}, "jwt_algorithms"),
        ({"algorithms": ()}, "jwt_algorithms"),
        ({"issuer": ""}, "jwt_issuer"),
        ({"audience": ""}, "jwt_audience"),
        ({"tenant_claim": ""}, "jwt_tenant_claim"),
        ({"leeway_s": 301.0}, "jwt_leeway_s"),
        ({"refresh_s": 0.0}, "jwt_refresh_s"),
        ({"keys": "http://issuer.test/keys"}, "jwt_keys"),
        ({"keys": "/nowhere.json"}, "jwt_keys"),
    ],
)
def test_unsafe_or_incomplete_settings_are_refused_by_name(keys, settings, field):
    values = {"keys": str(keys), "issuer": ISSUER, "audience": AUDIENCE} | settings
    with pytest.raises(InvalidArgument) as refused:
        JwtVerifier(JwtSettings(**values))
    assert refused.value.field == field


# --- key sets ---------------------------------------------------------------------------------


def private_jwk():
    return json.loads(RSAAlgorithm.to_jwk(RSA_KEYS[0])) | {"kid": "one"}


UNUSABLE = {
    "no JSON": b"keys",
    "no object": b"[]",
    "no list": b'{"keys": 3}',
    "nested": b"[" * 100_000,
    "none": key_set(),
    "for encryption": key_set(jwk(RSA_KEYS[0], "one", use="enc")),
    "for another algorithm": key_set(jwk(RSA_KEYS[0], "one", alg="RS512")),
    "a shared secret": key_set({"kty": "oct", "k": "c2VjcmV0", "kid": "one", "alg": "HS256"}),
    "private": key_set(private_jwk()),
    "broken": key_set({"kty": "RSA", "n": "!", "e": "AQAB", "kid": "one"}),
    "of another curve": key_set(jwk(ec.generate_private_key(ec.SECP384R1()), "ec")),
    "a number as id": key_set(jwk(RSA_KEYS[0], 5)),
    "too many": key_set(*[jwk(RSA_KEYS[0], str(n)) for n in range(65)]),
    "too long": key_set(jwk(RSA_KEYS[0], "one")) + b" " * key_sets.MAX_SET_BYTES,
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_key_sets_without_a_usable_key_are_refused(name):
    with pytest.raises(InvalidArgument):
        parse_key_set(UNUSABLE[name], ("RS256", "ES256"), field="jwt_keys")


def test_short_rsa_keys_are_not_believed():
    short = rsa.generate_private_key(65537, 1024)
    found = parse_key_set(
        key_set(jwk(short, "short"), jwk(RSA_KEYS[0], "long")), ("RS256",), field="jwt_keys"
    )
    assert found.find("short", "RS256") is None and found.find("long", "RS256") is not None


async def test_a_key_file_follows_rotation(keys, monkeypatch):
    monkeypatch.setattr(files_module, "LOOK_EVERY_S", 0.0)
    check = verifier(keys)
    new = token(RSA_KEYS[1], "two")
    with pytest.raises(Unauthenticated):
        await check.claims(new)
    keys.write_bytes(key_set(jwk(RSA_KEYS[1], "two")))
    assert await check.claims(new)
    with pytest.raises(Unauthenticated, match="does not have"):  # withdrawn
        await check.claims(token())
    keys.write_bytes(b"{}")
    assert await check.claims(new)
    assert await check.claims(token(RSA_KEYS[1], kid=None))  # the only one need not be named


class Issuer:
    """A key set behind a clock; counts how often it is fetched."""

    def __init__(self, *keys):
        self.keys = keys
        self.fetches = 0
        self.now = 1000.0
        self.error = None
        self.delay_s = 0.0

    def __call__(self):
        self.fetches += 1
        time.sleep(self.delay_s)
        if self.error:
            raise self.error
        return key_set(*self.keys)

    def source(self):
        return FetchedKeys(
            self, ("RS256",), field="jwt_keys", refresh_s=300, clock=lambda: self.now
        )


@pytest.fixture
def issuer():
    return Issuer(jwk(RSA_KEYS[0], "one"))


async def test_keys_are_fetched_once_and_kept(issuer):
    source = issuer.source()
    issuer.delay_s = 0.05
    found = await asyncio.gather(*(source.find("one", "RS256") for _ in range(50)))
    assert all(found) and issuer.fetches == 1
    issuer.now += 200
    assert await source.find("one", "RS256") and issuer.fetches == 1


async def test_an_unknown_key_is_looked_for_at_the_issuer_but_not_at_any_rate(issuer):
    source = issuer.source()
    await source.find("one", "RS256")
    for n in range(100):  # made-up ids
        assert await source.find(f"id-{n}", "RS256") is None
    assert issuer.fetches == 1
    issuer.now += key_sets.REFETCH_S
    issuer.keys = [jwk(RSA_KEYS[1], "two")]
    found = await asyncio.gather(*(source.find("two", "RS256") for _ in range(20)))
    assert all(found) and issuer.fetches == 2
    assert await source.find("one", "RS256") is None


async def test_withdrawn_keys_go_with_the_next_refresh(issuer):
    source = issuer.source()
    await source.find("one", "RS256")
    issuer.keys = [jwk(RSA_KEYS[1], "two")]
    issuer.now += 301
    assert await source.find("one", "RS256")  # fetched meanwhile
    async with asyncio.timeout(TIMEOUT_S):
        while await source.find("one", "RS256"):
            await asyncio.sleep(0.01)
    assert issuer.fetches == 2


async def test_known_keys_hold_for_a_day_while_the_issuer_is_away(issuer, caplog):
    source = issuer.source()
    await source.find("one", "RS256")
    issuer.error = OSError("no route")
    for _ in range(5):
        issuer.now += 301
        assert await source.find("one", "RS256")
        await asyncio.sleep(0.02)
    assert "cannot be fetched" in caplog.text and issuer.fetches > 1
    issuer.now += key_sets.MAX_AGE_S
    with pytest.raises(Unavailable, match="retry"):
        await source.find("one", "RS256")
    fetches = issuer.fetches
    for _ in range(20):
        with pytest.raises(Unavailable):
            await source.find("one", "RS256")
    assert issuer.fetches == fetches
    issuer.error, issuer.now = None, issuer.now + key_sets.REFETCH_S
    assert await source.find("one", "RS256")


async def test_an_issuer_that_was_never_reached_is_unavailable_not_open(issuer):
    issuer.error = ValueError("more than 10 bytes")
    with pytest.raises(Unavailable):
        await issuer.source().find("one", "RS256")
    issuer.error, issuer.keys = None, ["garbage"]
    with pytest.raises(Unavailable):
        await issuer.source().find("one", "RS256")


# --- over HTTPS -------------------------------------------------------------------------------


@contextlib.contextmanager
def https(folder, answer):
    """(URL, path of its CA). `answer(handler)` writes the response."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            answer(self)

        def log_message(self, *args):
            pass

    authority = certificate("issuer-ca", ca=True)
    issued = certificate("issuer", issuer=authority)
    for name, content in (
        ("ca", cert_pem(authority)),
        ("pair", cert_pem(issued) + pem(issued[1])),
    ):
        (folder / name).write_bytes(content)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "pair")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"https://localhost:{server.server_port}/keys", str(folder / "ca")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def replying(data, status=200, **headers):
    def answer(handler):
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        with contextlib.suppress(OSError):
            handler.wfile.write(data)

    return answer


def test_keys_come_over_https_from_a_server_of_the_right_ca(tmp_path):
    with https(tmp_path, replying(b'{"keys": []}')) as (url, ca):
        assert fetch_https(url, ca) == b'{"keys": []}'
        with pytest.raises(OSError, match="certificate"):
            fetch_https(url)


def test_what_is_no_key_set_is_not_read_to_its_end(tmp_path, monkeypatch):
    def drip(handler):
        replying(b"")(handler)
        with contextlib.suppress(OSError):
            while True:
                handler.wfile.write(b"x")
                time.sleep(0.02)

    with https(tmp_path, replying(b"x" * (key_sets.MAX_SET_BYTES + 1))) as (url, ca):
        with pytest.raises(ValueError, match="more than"):
            fetch_https(url, ca)
    for status, headers in ((500, {}), (302, {"Location": "https://localhost:1/else"})):
        with https(tmp_path, replying(b"", status, **headers)) as (url, ca):
            with pytest.raises(OSError, match=str(status)):
                fetch_https(url, ca)
    monkeypatch.setattr(key_sets, "FETCH_S", 0.3)
    for answer in (drip, lambda handler: time.sleep(20)):
        with https(tmp_path, answer) as (url, ca):
            started = time.monotonic()
            with pytest.raises(OSError):
                fetch_https(url, ca)
            assert time.monotonic() - started < 8


# --- together with everything else ------------------------------------------------------------


async def test_static_tokens_and_jwts_go_together(keys, tmp_path):
    (tmp_path / "tokens").write_text("acme:s3cret\n")
    both = Authenticator(StaticTokens(str(tmp_path / "tokens")), verifier(keys))
    for given, expected in (("s3cret", Caller("acme")), (token(), Caller("alice", "alice"))):
        assert await both.caller([("authorization", f"Bearer {given}")]) == expected
    with pytest.raises(Unauthenticated):
        await both.caller([("authorization", "Bearer wrong")])


async def test_a_server_takes_jwts_and_running_streams_outlive_their_tokens(tmp_path):
    class WhoAmI(grpc.GenericRpcHandler):
        def service(self, details):
            async def answer(requests, context):
                async for _ in requests:
                    yield current_caller().tenant.encode()

            return grpc.stream_stream_rpc_method_handler(answer)

    with https(tmp_path, replying(key_set(jwk(RSA_KEYS[0], "one")))) as (url, ca):
        config = ServerConfig(
            jwt_keys=url,
            jwt_keys_ca=ca,
            jwt_issuer=ISSUER,
            jwt_audience=AUDIENCE,
            jwt_leeway_s=0.0,
        )
        server = Server(config, ["test.WhoAmI"])
        server.grpc.add_generic_rpc_handlers((WhoAmI(),))
        await server.start()
        try:
            async with open_channel(server.address) as channel:
                method = channel.stream_stream("/test.WhoAmI/Ask")
                short = (("authorization", f"Bearer {token(exp=now(2))}"),)
                call = method(metadata=short, timeout=TIMEOUT_S)
                await call.write(b"?")
                assert await call.read() == b"alice"
                await asyncio.sleep(2.1)
                late = method(metadata=short, timeout=TIMEOUT_S)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await late.read()
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert "expired" in refused.value.details()
                await call.write(b"?")
                assert await call.read() == b"alice"
                call.cancel()
        finally:
            await server.grpc.stop(None)


def test_without_the_library_the_extra_is_named(keys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jwt", None)
    with pytest.raises(InvalidArgument, match=r"outrider\[jwt\]"):
        verifier(keys)
