"""Installations that the chart must render well, and some that it must refuse."""

from charts import PROFILES, Case

_GPU_POOL = {
    "gpu": {"resource": "nvidia.com/mig-2g.20gb", "count": 2},
    "nodeSelector": {"pool": "gpus"},
    "tolerations": [{"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}]}
                ]
            }
        }
    },
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "topology.kubernetes.io/zone",
            "whenUnsatisfiable": "DoNotSchedule",
        }
    ],
    "runtimeClassName": "nvidia",
    "priorityClassName": "serving",
    "podLabels": {"team": "models"},
    "podAnnotations": {"note": "a"},
}
_SECRETS = {"orchestrator": "a", "draft": "b", "target": "c", "redis": "d"}
_JWT = {
    "issuer": "https://login.example.com",
    "audience": "outrider",
    "keysUrl": "https://login.example.com:8443/keys",
    "tenantClaim": "org",
    "algorithms": ["ES256"],
}
_KEDA = {"autoscaling": {"kind": "keda"}}
_HPA = {"autoscaling": {"kind": "hpa"}}

PROFILE_CASES = (Case("defaults"), *(Case(name, profile=name) for name in PROFILES))

MATRIX = (
    Case("plaintext", {"tls": {"mode": "none"}, "auth": {"callers": {"enabled": False}}}),
    Case("no-tokens", {"auth": {"callers": {"enabled": False}, "workers": {"enabled": False}}}),
    Case("supplied-certificates", {"tls": {"mode": "secrets", "secrets": _SECRETS}}),
    Case(
        "self-signed",
        {"tls": {"mode": "selfSigned", "extraNames": ["llm.example.com", "10.0.0.1", "::1"]}},
    ),
    Case("partly-supplied", {"tls": {"mode": "selfSigned", "secrets": {"orchestrator": "a"}}}),
    Case(
        "an-issuer",
        {
            "tls": {
                "mode": "certManager",
                "certManager": {"issuerRef": {"name": "vault", "kind": "ClusterIssuer"}},
                "extraNames": ["llm.example.com", "10.0.0.1"],
                "publicSecret": "public",
                "requireClientCertificate": True,
            }
        },
    ),
    Case("cert-manager-found", apis=("cert-manager.io/v1",)),
    Case("any-certificate-of-the-ca", {"tls": {"checkClientNames": False}}),
    Case(
        "jwts-besides-tokens",
        {
            "auth": {"jwt": _JWT | {"caSecret": "i", "leewaySeconds": 5}},
            "networkPolicy": {"issuer": [{"ipBlock": {"cidr": "10.1.2.3/32"}}]},
        },
    ),
    Case(
        "jwts-alone",
        {"auth": {"callers": {"enabled": False}, "jwt": _JWT}, "test": {"tokenSecret": "t"}},
    ),
    Case(
        "jwts-by-a-key-set",
        {
            "auth": {
                "callers": {"enabled": False},
                "jwt": _JWT | {"keysUrl": "", "keysSecret": "k", "keysKey": "keys.json"},
            }
        },
    ),
    Case(
        "quotas",
        {
            "quotas": {
                "callsPerSecond": 2.5,
                "callsBurst": 20,
                "callers": {
                    "acme": {"running": 8, "waiting": 32, "weight": 2.5, "priority": "high"},
                    "*": {"running": 2, "priority": "low"},
                },
            },
            "audit": {"level": "all"},
            "auth": {"adminCallers": ["ops", "acme"]},
        },
    ),
    Case(
        "traced",
        {
            "telemetry": {
                "otlp": {
                    "endpoint": "https://collector.example.com:4318",
                    "protocol": "http",
                    "headersSecret": "h",
                    "caSecret": "o",
                },
                "traces": {"sampleRate": 0.25, "everyRounds": 64},
            }
        },
    ),
    Case(
        "kv-store",
        {
            "kvStore": {"enabled": True, "tiers": ["draft", "target"], "restore": "always"},
            "networkPolicy": {"storeClients": [{"podSelector": {"matchLabels": {"app": "exp"}}}]},
        },
    ),
    Case(
        "kv-store-without-tls",
        {"kvStore": {"enabled": True, "existingSecret": "kv"}, "tls": {"mode": "none"}},
    ),
    Case(
        "kv-store-elsewhere",
        {
            "kvStore": {
                "enabled": True,
                "external": {
                    "url": "rediss://kv@kv.example.com:6390",
                    "orchestratorUrl": "rediss://orchestrator@index.example.com:6391",
                    "passwordSecret": "p",
                    "tlsSecret": "t",
                    "clientCertificate": True,
                    "peers": [{"ipBlock": {"cidr": "10.1.2.0/24"}}],
                },
            }
        },
    ),
    Case(
        "store-users",
        {
            "redis": {
                "users": [
                    {"name": "exporter", "secret": "e", "rights": ["-@all", "+ping", "+info"]},
                    {"name": "backup", "secret": "b", "rights": ["~*", "+@read", "+bgrewriteaof"]},
                ]
            }
        },
    ),
    Case(
        "supplied-secrets",
        {
            "auth": {
                "callers": {"existingSecret": "c"},
                "workers": {"existingSecret": "w", "acceptedKey": "tokens"},
            },
            "redis": {"existingSecret": "r", "persistence": {"storageClass": "fast"}},
        },
    ),
    Case(
        "discovery-by-kubernetes",
        {
            "discovery": "kubernetes",
            "orchestrator": {"serviceAccount": {"create": False, "name": "mine"}},
        },
    ),
    Case("store-in-memory", {"redis": {"persistence": {"enabled": False}}}),
    Case(
        "a-store-elsewhere",
        {"redis": {"enabled": False, "external": {"url": "redis://store.example.com:6380/1"}}},
    ),
    Case(
        "a-store-elsewhere-with-tls",
        {
            "redis": {
                "enabled": False,
                "external": {
                    "url": "rediss://outrider@store.example.com:6380",
                    "passwordSecret": "p",
                    "passwordKey": "redis-password",
                    "tlsSecret": "t",
                    "clientCertificate": True,
                    "peers": [{"ipBlock": {"cidr": "10.1.2.0/24"}}],
                },
            }
        },
    ),
    Case(
        "sentinels",
        {
            "redis": {
                "enabled": False,
                "external": {
                    "url": "rediss+sentinel://outrider@a.example.com,b.example.com:26380,[::1]"
                    "/sessions/2?sentinel_user=asker",
                    "passwordSecret": "p",
                    "sentinelPasswordKey": "sentinels",
                    "tlsSecret": "t",
                },
            }
        },
    ),
    Case(
        "a-cluster",
        {
            "redis": {
                "enabled": False,
                "external": {
                    "url": "redis+cluster://outrider@n1.example.com:7000,n2.example.com",
                    "passwordSecret": "p",
                    "peers": [{"ipBlock": {"cidr": "10.1.2.0/24"}}],
                    "ports": [7001, 7000],
                },
            }
        },
    ),
    Case("no-drafts", {"draft": {"replicas": 0}, "metrics": {"rules": {"enabled": True}}}),
    Case("hpa", {"orchestrator": _HPA, "draft": _HPA, "target": _HPA}),
    Case("keda", {"orchestrator": _KEDA, "draft": _KEDA, "target": _KEDA}),
    Case(
        "groups",
        {
            "target": {
                "kind": "LeaderWorkerSet",
                "group": {
                    "size": 4,
                    "tensorParallel": 16,
                    "maxUnavailable": "25%",
                    "maxSurge": 1,
                    "exclusiveTopology": "topology.kubernetes.io/rack",
                },
                **_HPA,
                **_GPU_POOL,
            }
        },
    ),
    Case("groups-of-one", {"target": {"kind": "LeaderWorkerSet", **_KEDA}}),
    Case("no-policies", {"networkPolicy": {"enabled": False}}),
    Case(
        "narrow-policies",
        {
            "networkPolicy": {
                "callers": [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}],
                "collector": [{"podSelector": {"matchLabels": {"app": "otel"}}}],
                "modelHub": True,
            },
            "telemetry": {"otlp": {"endpoint": "http://otel.example.com:4317"}},
        },
    ),
    Case(
        "monitored",
        {
            "metrics": {
                "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
                "serviceMonitor": {"enabled": True},
                "rules": {"enabled": True, "labels": {"release": "prometheus"}},
                "dashboard": {"enabled": True, "annotations": {"folder": "models"}},
            }
        },
    ),
    Case("no-metrics", {"metrics": {"enabled": False}}),
    Case(
        "ingress",
        {
            "ingress": {
                "enabled": True,
                "className": "nginx",
                "annotations": {"nginx.ingress.kubernetes.io/backend-protocol": "GRPCS"},
                "host": "llm.example.com",
                "tlsSecret": "public",
            }
        },
    ),
    Case(
        "routes",
        {
            "gateway": {
                "grpcRoute": {
                    "enabled": True,
                    "parentRefs": [{"name": "outside", "namespace": "gateways"}],
                    "hostnames": ["llm.example.com"],
                },
                "httpRoute": {"enabled": True, "parentRefs": [{"name": "outside"}]},
                "backendTls": {
                    "enabled": True,
                    "caCertificateRefs": [{"group": "", "kind": "ConfigMap", "name": "ca"}],
                },
            }
        },
    ),
    Case("pools", {"draft": _GPU_POOL, "target": _GPU_POOL}),
    Case(
        "models-as-images",
        {
            "target": {
                "model": {
                    "reference": "/models/8b",
                    "name": "big",
                    "volume": {"image": {"reference": "registry.example.com/models/8b:1"}},
                    "hubTokenSecret": "hub",
                }
            }
        },
        since="1.31",
    ),
    Case(
        "volumes",
        {
            "target": {
                "cache": {
                    "claim": {
                        "accessModes": ["ReadWriteOnce"],
                        "resources": {"requests": {"storage": "10Gi"}},
                    }
                },
                "extraEnv": [{"name": "A", "value": "b"}],
                "extraVolumes": [{"name": "more", "emptyDir": {}}],
                "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
            },
            "draft": {"cache": {"volume": {"persistentVolumeClaim": {"claimName": "shared"}}}},
        },
    ),
    Case(
        "images",
        {
            "image": {"registry": "registry.example.com/outrider", "tag": "1.2.3"},
            "imagePullSecrets": [{"name": "pull"}],
            "target": {"image": {"digest": "sha256:" + "ab" * 32}},
            "redis": {"image": {"registry": "registry.example.com", "tag": "8"}},
        },
    ),
    Case(
        "names",
        {
            "fullnameOverride": "speedy",
            "nameOverride": "llm",
            "commonLabels": {"cost-centre": "7"},
            "commonAnnotations": {"owner": "models"},
            "clusterDomain": "k8s.example.com",
            "listenHost": "[::]",
        },
    ),
    Case(
        "settings",
        {
            "orchestrator": {
                "settings": {
                    "max_message_bytes": 16777216,
                    "lease_s": 12.5,
                    "log_json": False,
                    "proposer": "auto",
                },
                "service": {"type": "LoadBalancer", "appProtocol": "grpc"},
            },
            "target": {"settings": {"threads": 3, "kv_memory": "3GiB"}},
            "draft": {"resources": {"limits": {"cpu": "1500m"}}},
        },
    ),
    Case(
        "more-objects",
        {
            "extraObjects": [
                "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {{ .Release.Name }}-first\n",
                {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "second"}},
            ]
        },
    ),
)

REFUSED = (
    ("a typing error", {"orchestrater": {}}, "orchestrater"),
    ("a typing error below", {"target": {"replica": 2}}, "replica"),
    ("an unknown setting", {"target": {"settings": {"kv_memry": "1GiB"}}}, "kv_memry"),
    ("a setting of the wrong type", {"target": {"settings": {"max_rows": "many"}}}, "max_rows"),
    ("a setting outside its choices", {"draft": {"settings": {"dtype": "int3"}}}, "dtype"),
    ("a setting of the chart's own", {"draft": {"settings": {"port": 1}}}, "port"),
    ("a port out of range", {"ports": {"target": 70000}}, "target"),
    (
        "a password in a ConfigMap",
        {"redis": {"enabled": False, "external": {"url": "redis://u:secret@h:1"}}},
        "external/url",
    ),
    (
        "a password of a cluster's user in a ConfigMap",
        {"redis": {"enabled": False, "external": {"url": "redis+cluster://u:secret@h,i:1"}}},
        "external/url",
    ),
    (
        "a password of sentinels in a ConfigMap",
        {
            "redis": {
                "enabled": False,
                "external": {"url": "redis+sentinel://h/s?sentinel_password=x"},
            }
        },
        "external/url",
    ),
    (
        "sentinels of no primary",
        {"redis": {"enabled": False, "external": {"url": "redis+sentinel://h:26379"}}},
        "external/url",
    ),
    (
        "a password for sentinels that there are not",
        {
            "redis": {
                "enabled": False,
                "external": {
                    "url": "redis://h",
                    "passwordSecret": "p",
                    "sentinelPasswordKey": "s",
                },
            }
        },
        "sentinelPasswordKey",
    ),
    (
        "KV blocks in a cluster",
        {"kvStore": {"enabled": True, "external": {"url": "redis+cluster://h,i"}}},
        "external/url",
    ),
    (
        "one admin that would be two",
        {"auth": {"adminCallers": ["ops,acme"]}},
        "adminCallers",
    ),
    ("no store", {"redis": {"enabled": False}}, "external"),
    ("certificates of nobody", {"tls": {"mode": "secrets"}}, "tls.secrets.orchestrator"),
    (
        "JWTs for whoever",
        {"auth": {"jwt": _JWT | {"audience": ""}}},
        "auth.jwt.audience",
    ),
    ("JWTs that nobody can check", {"auth": {"jwt": _JWT | {"keysUrl": ""}}}, "auth.jwt.keysUrl"),
    ("keys over plain HTTP", {"auth": {"jwt": _JWT | {"keysUrl": "http://i/k"}}}, "keysUrl"),
    ("a symmetric signature", {"auth": {"jwt": _JWT | {"algorithms": ["HS256"]}}}, "algorithms"),
    ("a caller with a colon", {"quotas": {"callers": {"a:b": {}}}}, "a:b"),
    ("a limit that there is not", {"quotas": {"callers": {"a": {"speed": 1}}}}, "speed"),
    ("an endpoint without a scheme", {"telemetry": {"otlp": {"endpoint": "h:1"}}}, "endpoint"),
    ("a second way to say it", {"orchestrator": {"settings": {"jwt_issuer": "x"}}}, "jwt_issuer"),
    (
        "KV of ranks in a store",
        {
            "kvStore": {"enabled": True},
            "target": {"group": {"tensorParallel": 2}, "gpu": {"count": 2}},
        },
        "kvStore.tiers",
    ),
    (
        "a user of the chart's own",
        {"redis": {"users": [{"name": "outrider", "secret": "x", "rights": ["+@all"]}]}},
        "users/0/name",
    ),
    (
        "rights that end a line",
        {"redis": {"users": [{"name": "x", "secret": "x", "rights": ["+get\nuser y on"]}]}},
        "rights",
    ),
    ("a group in a StatefulSet", {"target": {"group": {"size": 2}}}, "LeaderWorkerSet"),
    (
        "ranks that would not know each other",
        {
            "target": {"kind": "LeaderWorkerSet", "group": {"size": 2}},
            "auth": {"workers": {"enabled": False}},
        },
        "auth.workers",
    ),
    (
        "scaling by nothing",
        {"metrics": {"enabled": False}, "draft": {"autoscaling": {"kind": "hpa"}}},
        "metrics.enabled",
    ),
    (
        "scaling by a signal that there is not",
        {"draft": {"autoscaling": {"kind": "keda", "targets": {"luck": 1}}}},
        "luck",
    ),
    ("an ingress for no host", {"ingress": {"enabled": True}}, "host"),
    ("a route from no gateway", {"gateway": {"grpcRoute": {"enabled": True}}}, "parentRefs"),
)
