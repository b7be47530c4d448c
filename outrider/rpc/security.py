"""What every service can be told about its callers: who they are, and what they may ask for."""

from dataclasses import dataclass

from outrider.config import setting
from outrider.errors import InvalidArgument
from outrider.rpc import audit
from outrider.rpc.auth import Authenticator
from outrider.rpc.guard import CallGuard
from outrider.rpc.jwt_tokens import JwtSettings, JwtVerifier
from outrider.rpc.quota import CallQuota
from outrider.rpc.tls import ServerTls
from outrider.rpc.tokens import StaticTokens


@dataclass(frozen=True)
class SecuritySettings:
    """Certificates, callers, quotas and the audit log of a server. Files are looked at again and
    again: what is in them may be renewed while the service runs."""

    tls_cert: str = setting("", help="PEM certificate chain; switches TLS on")
    tls_key: str = setting("", help="PEM private key of the certificate")
    tls_client_ca: str = setting("", help="PEM CA of client certificates, which it requires (mTLS)")
    tls_client_names: tuple[str, ...] = setting(
        (),
        help="name (DNS, URI or address) that a client certificate must have; default: any that "
        "the CA has certified",
    )
    auth_token_file: str = setting("", help="file of bearer tokens, a line `tenant:token` each")
    jwt_keys: str = setting(
        "",
        help="JSON Web Key Set of the issuer of callers' JWTs, a file or an https URL; switches "
        "JWTs on",
    )
    jwt_keys_ca: str = setting("", help="PEM CA of that URL; default: those of the system")
    jwt_issuer: str = setting("", help="issuer (claim iss) of JWTs")
    jwt_audience: str = setting("", help="audience (claim aud) of JWTs: the name of this service")
    jwt_algorithms: tuple[str, ...] = setting(
        ("RS256", "ES256"), help="signature algorithm of JWTs, an asymmetric one"
    )
    jwt_tenant_claim: str = setting("sub", help="claim of JWTs that names the tenant")
    jwt_leeway_s: float = setting(30.0, help="seconds that clocks may differ by")
    jwt_refresh_s: float = setting(
        300.0, help="seconds after which a key set is fetched again, so that withdrawn keys go"
    )
    reflection_open: bool = setting(False, help="server reflection needs no token, as health")
    calls_per_s: float = setting(0.0, help="calls a second that a caller may start; 0: no limit")
    calls_burst: int = setting(0, help="calls that it may start at once; 0: two seconds' worth")
    audit: str = setting(
        audit.REFUSED, help="calls that the audit log tells of", choices=audit.LEVELS
    )
    audit_file: str = setting("", help="file of the audit log; default: stderr")

    @property
    def server_tls(self) -> ServerTls | None:
        """Raises InvalidArgument for half of TLS, which would be weaker than it looks."""
        if self.tls_cert:
            if not self.tls_key:
                raise InvalidArgument("a certificate and its key go together", field="tls_key")
            if self.tls_client_names and not self.tls_client_ca:
                raise InvalidArgument("names need the CA of the clients", field="tls_client_ca")
            return ServerTls(self.tls_cert, self.tls_key, self.tls_client_ca)
        if self.tls_key or self.tls_client_ca or self.tls_client_names:
            raise InvalidArgument("TLS needs a certificate of the server", field="tls_cert")
        return None

    def make_guard(self) -> CallGuard:
        """What stands before every call. Raises InvalidArgument for settings that do not fit."""
        tokens = StaticTokens(self.auth_token_file) if self.auth_token_file else None
        return CallGuard(
            Authenticator(tokens, self._jwt_verifier()),
            audit=audit.AuditLog(self.audit),
            quota=CallQuota(self.calls_per_s, self.calls_burst),
            client_names=frozenset(self.tls_client_names),
            reflection_open=self.reflection_open,
        )

    def _jwt_verifier(self) -> JwtVerifier | None:
        if not self.jwt_keys:
            for name in ("jwt_issuer", "jwt_audience"):
                if getattr(self, name):
                    raise InvalidArgument("is needed where JWTs are to be taken", field="jwt_keys")
            return None
        return JwtVerifier(
            JwtSettings(
                keys=self.jwt_keys,
                issuer=self.jwt_issuer,
                audience=self.jwt_audience,
                keys_ca=self.jwt_keys_ca,
                algorithms=self.jwt_algorithms,
                tenant_claim=self.jwt_tenant_claim,
                leeway_s=self.jwt_leeway_s,
                refresh_s=self.jwt_refresh_s,
            )
        )
