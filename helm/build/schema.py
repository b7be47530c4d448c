"""The JSON schema of the chart's values. Strict: what is not named here is refused, so that a
typing error does not quietly leave a default in force."""

import dataclasses
import types
import typing
from typing import Any

from comments import Path
from outrider.rpc.audit import LEVELS as AUDIT_LEVELS
from outrider.rpc.key_sets import ALGORITHMS
from outrider.telemetry.service import PROTOCOLS
from outrider.types import Priority
from services.draft import service as draft
from services.orchestrator.config import OrchestratorConfig
from services.target.service import TargetConfig

Schema = dict[str, Any]

# What the chart sets by itself, from other values.
MANAGED = frozenset(
    "host port socket health_port ready_file drain_s metrics_address auth_token_file "
    "tls_cert tls_key tls_client_ca worker_ca worker_cert worker_key worker_token_file "
    "worker_tls_name draft_ca draft_cert draft_key draft_token_file draft_tls_name "
    "store_url store_password_file store_sentinel_password_file store_start_timeout_s "
    "store_ca store_cert store_key targets drafts zone "
    "model model_name cache_dir tensor_parallel group_token_file group_host group_port "
    "tls_client_names jwt_keys jwt_keys_ca jwt_issuer jwt_audience jwt_algorithms jwt_tenant_claim "
    "jwt_leeway_s jwt_refresh_s calls_per_s calls_burst caller_limits audit otlp_endpoint "
    "otlp_protocol trace_sample_rate trace_every kv_store_url kv_store_password_file kv_store_ca "
    "kv_store_cert kv_store_key kv_store_timeout_s kv_store_ttl_s kv_store_write_mib_s "
    "kv_restore kv_index_wait_s admin_callers".split()
)

STRING: Schema = {"type": "string"}
BOOL: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "integer", "minimum": 1}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
AMOUNT: Schema = {"type": ["integer", "string"], "pattern": r"^\d+%?$", "minimum": 0}
QUANTITY: Schema = {"type": "string", "pattern": r"^\d+(\.\d+)?([EPTGMk]i?|m)?$"}
NAME: Schema = {
    "type": "string",
    "pattern": r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?)?$",
    "maxLength": 253,
}
DURATION: Schema = {"type": "string", "pattern": r"^(\d+(\.\d+)?(ms|s|m|h))+$"}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
# Objects of Kubernetes, which checks them itself.
OBJECT: Schema = {"type": "object"}
OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}


def obj(**properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def array(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def named(**properties: Schema) -> Schema:
    """A list of objects of Kubernetes that have names; `properties` may be among the rest."""
    return array(
        {"type": "object", "required": ["name"], "properties": {"name": STRING, **properties}}
    )


RESOURCES = obj(
    requests={"type": "object", "additionalProperties": {"type": ["string", "integer", "number"]}},
    limits={"type": "object", "additionalProperties": {"type": ["string", "integer", "number"]}},
    claims=OBJECTS,
)
TOLERATIONS = array(
    obj(
        key=STRING,
        operator=one_of("Exists", "Equal", "Lt", "Gt"),
        value=STRING,
        effect=one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
        tolerationSeconds={"type": "integer"},
    )
)
AFFINITY = obj(nodeAffinity=OBJECT, podAffinity=OBJECT, podAntiAffinity=OBJECT)
SPREAD = array(
    {
        "type": "object",
        "required": ["maxSkew", "topologyKey", "whenUnsatisfiable"],
        "properties": {
            "maxSkew": POSITIVE,
            "topologyKey": STRING,
            "whenUnsatisfiable": one_of("DoNotSchedule", "ScheduleAnyway"),
        },
    }
)
PLACE = {
    "podAnnotations": TEXTS,
    "nodeSelector": TEXTS,
    "affinity": AFFINITY,
    "tolerations": TOLERATIONS,
    "priorityClassName": NAME,
}


def image(*, registry: bool = False) -> Schema:
    parts = {
        "repository": {"type": "string", "minLength": 1},
        "tag": {"type": "string", "pattern": r"^[A-Za-z0-9_.-]{0,128}$"},
        "digest": {"type": "string", "pattern": r"^(sha256:[0-9a-f]{64})?$"},
    }
    return obj(**({"registry": {"type": "string", "minLength": 1}} if registry else {}), **parts)


def settings_of(config: type) -> Schema:
    """The settings of a service that are left to the user."""
    hints = typing.get_type_hints(config)
    properties = {}
    for field in dataclasses.fields(config):
        if field.name not in MANAGED and not field.metadata.get("secret"):
            kind = _type_of(hints[field.name])
            if field.metadata["choices"]:
                kind = one_of(*field.metadata["choices"])
            properties[field.name] = kind | {"description": field.metadata["help"]}
    return obj(**properties)


def _type_of(hint: Any) -> Schema:
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        return array(STRING)
    return {"type": {bool: "boolean", int: "integer", float: "number", str: "string"}[hint]}


def tier(config: type, **more: Schema) -> Schema:
    """What all tiers of the services' own have."""
    return obj(
        replicas=COUNT,
        image=image(),
        settings=settings_of(config),
        extraEnv=named(),
        extraVolumes=named(),
        extraVolumeMounts=named(mountPath=STRING),
        resources=RESOURCES,
        startupSeconds=POSITIVE,
        preStopSeconds=POSITIVE,
        drainSeconds=POSITIVE,
        minReadySeconds=COUNT,
        serviceAccount=obj(create=BOOL, name=NAME, annotations=TEXTS),
        podDisruptionBudget=obj(enabled=BOOL, maxUnavailable=AMOUNT),
        autoscaling=obj(
            kind=one_of("none", "hpa", "keda"),
            minReplicas=POSITIVE,
            maxReplicas=POSITIVE,
            targets={
                "type": "object",
                "additionalProperties": {"type": "number", "minimum": 0},
            },
            behavior=OBJECT,
        ),
        podLabels=TEXTS,
        topologySpreadConstraints=SPREAD,
        runtimeClassName=NAME,
        **PLACE,
        **more,
    )


def worker(config: type, **more: Schema) -> Schema:
    cache = more.pop("cache", obj(size=QUANTITY, volume=OBJECT))
    return tier(
        config,
        model=obj(
            reference={"type": "string", "minLength": 1},
            name=STRING,
            volume=OBJECT,
            hubTokenSecret=NAME,
        ),
        gpu=obj(resource={"type": "string", "minLength": 1}, count=COUNT),
        shmSize=QUANTITY,
        cache=cache,
        **more,
    )


def route() -> Schema:
    return obj(enabled=BOOL, parentRefs=OBJECTS, hostnames=array(STRING), annotations=TEXTS) | when(
        "enabled", then={"parentRefs": {"minItems": 1}}
    )


def when(switch: str, *, then: dict[str, Schema], is_: Any = True) -> Schema:
    """What must hold where a switch has a value."""
    return {
        "if": {"properties": {switch: {"const": is_}}},
        "then": {"properties": then},
    }


# A password in a URL would end in a ConfigMap.
_USER, _HOST = r"([^:@/,?\s]*@)?", r"([^:@/,?\s\[\]]+|\[[0-9A-Fa-f:.]+\])(:\d+)?"
_ONE_SERVER = rf"://{_USER}{_HOST}(/\d*)?"
_SENTINELS = rf"\+sentinel://{_USER}{_HOST}(,{_HOST})*/[^/?@\s]+(/\d*)?(\?sentinel_user=[^&=\s]+)?"
_CLUSTER = rf"\+cluster://{_USER}{_HOST}(,{_HOST})*(/0?)?"
STORE_URL: Schema = {
    "type": "string",
    "pattern": f"^(rediss?({_ONE_SERVER}|{_SENTINELS}|{_CLUSTER}))?$",
}
KV_STORE_URL: Schema = {"type": "string", "pattern": f"^(rediss?{_ONE_SERVER})?$"}
STORE_MEMORY: Schema = {"type": "string", "pattern": r"^\d+([kmg]b)?$"}
SECRET_KEY: Schema = {"type": "string", "pattern": "^[A-Za-z0-9._-]+$"}


def external_store(**more: Schema) -> Schema:
    return obj(
        passwordSecret=NAME,
        passwordKey=SECRET_KEY,
        tlsSecret=NAME,
        clientCertificate=BOOL,
        peers=OBJECTS,
        ports=array(PORT) | {"uniqueItems": True},
        **more,
    )


STORE_USER: Schema = obj(
    name={
        "type": "string",
        "pattern": "^[a-z][a-z0-9-]*$",
        "not": {"enum": ["default", "outrider", "orchestrator", "keeper"]},
    },
    secret={**NAME, "minLength": 1},
    rights={
        "type": "array",
        "minItems": 1,
        "items": {"type": "string", "pattern": r"^[-+~%&@a-zA-Z0-9_:|*]+$"},
    },
) | {"required": ["name", "secret", "rights"]}

REDIS = obj(
    enabled=BOOL,
    image=image(registry=True),
    maxMemory=STORE_MEMORY,
    persistence=obj(
        enabled=BOOL,
        size=QUANTITY,
        storageClass=STRING,
        appendFsync=one_of("always", "everysec", "no"),
    ),
    existingSecret=NAME,
    users=array(STORE_USER),
    resources=RESOURCES,
    external=external_store(
        url=STORE_URL,
        sentinelPasswordKey={"type": "string", "pattern": "^[A-Za-z0-9._-]*$"},
    ),
    **PLACE,
) | when("enabled", is_=False, then={"external": {"properties": {"url": {"minLength": 1}}}})

KV_STORE = obj(
    enabled=BOOL,
    tiers=array(one_of("draft", "target")) | {"minItems": 1, "uniqueItems": True},
    image=image(registry=True),
    maxMemory=STORE_MEMORY,
    evictionPolicy=one_of("allkeys-lru", "allkeys-lfu", "volatile-lru", "volatile-ttl"),
    existingSecret=NAME,
    ttlSeconds=POSITIVE,
    writeMibPerSecond={"type": "number", "exclusiveMinimum": 0},
    restore=one_of("auto", "always"),
    timeoutSeconds={"type": "number", "minimum": 0.01, "maximum": 60},
    indexWaitSeconds={"type": "number", "minimum": 0.001},
    resources=RESOURCES,
    external=external_store(
        url=KV_STORE_URL, orchestratorUrl=KV_STORE_URL, orchestratorPasswordKey=SECRET_KEY
    ),
    **PLACE,
)

URL: Schema = {"type": "string", "pattern": r"^(https?://[^@\s]+)?$"}
SECONDS: Schema = {"type": "number", "minimum": 0}
JWT = obj(
    issuer=STRING,
    audience=STRING,
    keysUrl={"type": "string", "pattern": r"^(https://[^@\s]+)?$"},
    keysSecret=NAME,
    keysKey={"type": "string", "minLength": 1},
    caSecret=NAME,
    tenantClaim={"type": "string", "minLength": 1},
    algorithms=array(one_of(*ALGORITHMS)) | {"minItems": 1},
    leewaySeconds=SECONDS,
    refreshSeconds={"type": "number", "exclusiveMinimum": 0},
)
CALLER = obj(
    running=POSITIVE,
    waiting=COUNT,
    weight={"type": "number", "exclusiveMinimum": 0, "maximum": 1000},
    priority=one_of(*(priority.value for priority in Priority)),
)
QUOTAS = obj(
    callsPerSecond=SECONDS,
    callsBurst=COUNT,
    # A colon or a comma would end a name in the setting.
    callers={
        "type": "object",
        "propertyNames": {"pattern": r"^[^:,\s]+$"},
        "additionalProperties": CALLER,
    },
)
TELEMETRY = obj(
    otlp=obj(endpoint=URL, protocol=one_of(*PROTOCOLS), headersSecret=NAME, caSecret=NAME),
    traces=obj(sampleRate={"type": "number", "minimum": 0, "maximum": 1}, everyRounds=COUNT),
)

TLS = obj(
    mode=one_of("auto", "certManager", "secrets", "selfSigned", "none"),
    certManager=obj(
        issuerRef=obj(name=NAME, kind=STRING, group=STRING),
        duration=DURATION,
        renewBefore=DURATION,
    ),
    secrets=obj(orchestrator=NAME, draft=NAME, target=NAME, redis=NAME, kvStore=NAME),
    selfSigned=obj(validityDays=POSITIVE),
    publicSecret=NAME,
    extraNames=array({"type": "string", "minLength": 1}),
    requireClientCertificate=BOOL,
    checkClientNames=BOOL,
)

MONITOR = obj(enabled=BOOL, labels=TEXTS, interval=DURATION)


def build() -> Schema:
    return obj(
        # Helm's own, and for charts that have this one as a part.
        **{"global": OBJECT},
        nameOverride=NAME,
        fullnameOverride=NAME,
        commonLabels=TEXTS,
        commonAnnotations=TEXTS,
        clusterDomain={"type": "string", "minLength": 1},
        listenHost={"type": "string", "minLength": 1},
        image=obj(
            registry={"type": "string", "minLength": 1},
            tag={"type": "string", "pattern": r"^[A-Za-z0-9_.-]{0,128}$"},
            pullPolicy=one_of("Always", "IfNotPresent", "Never"),
        ),
        imagePullSecrets=named(),
        podSecurityContext=OBJECT,
        containerSecurityContext=OBJECT,
        discovery=one_of("dns", "kubernetes"),
        ports=obj(orchestrator=PORT, draft=PORT, target=PORT, health=PORT),
        tls=TLS,
        auth=obj(
            callers=obj(enabled=BOOL, existingSecret=NAME),
            jwt=JWT,
            # Names with commas between them are the setting.
            adminCallers=array({"type": "string", "pattern": r"^[^,\s]+$"}),
            workers=obj(
                enabled=BOOL,
                existingSecret=NAME,
                acceptedKey=SECRET_KEY,
            ),
        ),
        quotas=QUOTAS,
        audit=obj(level=one_of(*AUDIT_LEVELS)),
        telemetry=TELEMETRY,
        orchestrator=tier(
            OrchestratorConfig,
            strategy=OBJECT,
            service=obj(
                type=one_of("ClusterIP", "NodePort", "LoadBalancer"),
                port=PORT,
                annotations=TEXTS,
                appProtocol=STRING,
            ),
        ),
        draft=worker(draft.WorkerConfig, strategy=OBJECT),
        target=worker(
            TargetConfig,
            kind=one_of("StatefulSet", "LeaderWorkerSet"),
            group=obj(
                size=POSITIVE,
                tensorParallel=POSITIVE,
                maxUnavailable=AMOUNT,
                maxSurge=AMOUNT,
                exclusiveTopology=STRING,
            ),
            cache=obj(size=QUANTITY, volume=OBJECT, claim=OBJECT),
        ),
        redis=REDIS,
        kvStore=KV_STORE,
        networkPolicy=obj(
            enabled=BOOL,
            callers=OBJECTS,
            prometheus=OBJECTS,
            dns=OBJECTS,
            apiServer=OBJECTS,
            apiServerPorts=array(PORT),
            collector=OBJECTS,
            issuer=OBJECTS,
            storeClients=OBJECTS,
            modelHub=BOOL,
        ),
        metrics=obj(
            enabled=BOOL,
            port=PORT,
            signals={
                "type": "object",
                "propertyNames": {"pattern": "^[a-z][A-Za-z0-9]*$"},
                "additionalProperties": {"type": "string", "minLength": 1},
            },
            prometheusUrl={"type": "string", "pattern": "^https?://"},
            podMonitor=MONITOR,
            serviceMonitor=MONITOR,
            rules=obj(enabled=BOOL, labels=TEXTS),
            dashboard=obj(enabled=BOOL, labels=TEXTS, annotations=TEXTS),
        ),
        ingress=obj(enabled=BOOL, className=NAME, annotations=TEXTS, host=STRING, tlsSecret=NAME)
        | when("enabled", then={"host": {"minLength": 1}}),
        gateway=obj(
            grpcRoute=route(),
            httpRoute=route(),
            backendTls=obj(enabled=BOOL, caCertificateRefs=OBJECTS)
            | when("enabled", then={"caCertificateRefs": {"minItems": 1}}),
        ),
        test=obj(
            prompt={"type": "string", "minLength": 1},
            maxTokens=POSITIVE,
            timeoutSeconds=POSITIVE,
            tokenSecret=NAME,
        ),
        extraObjects=array({"type": ["object", "string"]}),
    )


def with_descriptions(comments: dict[Path, str], values: dict[str, Any]) -> Schema:
    """The schema, each value described by its comment. Fails where a value has none, or where
    schema and values differ in what there is."""
    schema = build()
    _describe(schema, comments, values, ())
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of Outrider's chart",
        **schema,
    }


def _describe(schema: Schema, comments: dict[Path, str], values: Any, path: Path) -> None:
    """Of a branch: what is described value by value."""
    for name, part in list(schema["properties"].items()):
        here = (*path, name)
        if name == "global" and not path:
            continue
        if name not in values:
            raise SystemExit(f"values.yaml lacks {'.'.join(here)}")
        described = schema["properties"][name] = dict(part)
        if here in comments:
            described["description"] = comments[here]
        if has_below(comments, here) and "properties" in described:
            described["properties"] = dict(described["properties"])
            _describe(described, comments, values[name], here)
        elif here not in comments and not has_below(comments, here):
            raise SystemExit(f"values.yaml says nothing of {'.'.join(here)}")
    for name in values:
        if name not in schema["properties"]:
            raise SystemExit(f"helm/build/schema.py lacks {'.'.join((*path, name))}")


def has_below(comments: dict[Path, str], path: Path) -> bool:
    """Whether the values below are described one by one."""
    return any(len(other) > len(path) and other[: len(path)] == path for other in comments)
