"""What must hold between the objects that the chart renders, and between them and the services."""

import base64
import json
import re
import shlex
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.x509.oid import ExtensionOID

from cases import MATRIX, PROFILE_CASES
from charts import CHART, NOT_YET, ROOT, Case, Manifest, named, of_kind, pods, render
from outrider.config import load_config
from outrider.telemetry.catalog import prometheus_names
from outrider.types import Priority
from queries import asked, faults
from services.draft.service import WorkerConfig
from services.orchestrator.callers import CallerLimits, Callers
from services.orchestrator.config import OrchestratorConfig
from services.target.service import TargetConfig

pytestmark = pytest.mark.chart

CASES = [*PROFILE_CASES, *MATRIX]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)

CONFIGS: dict[str, type] = {
    "orchestrator": OrchestratorConfig,
    "draft": WorkerConfig,
    "target": TargetConfig,
}


def tier_of(manifest: Manifest) -> str:
    return str(manifest["metadata"]["labels"]["app.kubernetes.io/component"])


def settings(manifests: list[Manifest], tier: str) -> dict[str, str]:
    (found,) = (m for m in of_kind(manifests, "ConfigMap")
                if m["metadata"].get("labels") and tier_of(m) == tier)  # fmt: skip
    return dict(found["data"])


def containers(pod: Manifest) -> list[Manifest]:
    return list(pod["spec"]["containers"])


@every_case
def test_services_know_their_settings(case: Case) -> None:
    manifests = render(case)
    for tier, config in CONFIGS.items():
        env = {k: v for k, v in settings(manifests, tier).items() if k not in NOT_YET}
        prefix = f"OUTRIDER_{tier.upper()}_"
        assert all(key.startswith(prefix) for key in env)
        load_config(config, [], env, prog=tier, env_prefix=prefix)


@every_case
def test_pods_may_nothing_that_they_need_not(case: Case) -> None:
    for name, pod in pods(render(case)):
        spec = pod["spec"]
        # Or a Service named outrider-target would be taken for a setting.
        assert spec["enableServiceLinks"] is False, name
        asks_api = case.values.get("discovery") == "kubernetes" or case.profile in ("gpu", "70b")
        wanted = asks_api and tier_of(pod) == "orchestrator"
        assert spec["automountServiceAccountToken"] is wanted, name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in containers(pod):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert container["resources"]["limits"]["memory"], name


@every_case
def test_an_orchestrator_alone_may_ask_the_cluster_and_for_endpoints_alone(case: Case) -> None:
    manifests = render(case)
    roles = of_kind(manifests, "Role", "ClusterRole")
    bindings = of_kind(manifests, "RoleBinding", "ClusterRoleBinding")
    for account in of_kind(manifests, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    if not roles:
        assert not bindings
        targets = settings(manifests, "orchestrator")["OUTRIDER_ORCHESTRATOR_TARGETS"]
        assert not targets.startswith("kubernetes:")
        return
    (role,), (binding,) = roles, bindings
    assert (role["kind"], binding["kind"]) == ("Role", "RoleBinding")
    assert role["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"],
         "verbs": ["list", "watch"]}
    ]  # fmt: skip
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    (pod,) = (pod for _, pod in pods(manifests) if tier_of(pod) == "orchestrator")
    assert subject["kind"] == "ServiceAccount"
    assert subject["name"] == pod["spec"]["serviceAccountName"]


@every_case
def test_what_pods_mount_is_there(case: Case) -> None:
    manifests = render(case)
    secrets = {m["metadata"]["name"]: set(m["data"]) for m in of_kind(manifests, "Secret")}
    for made in of_kind(manifests, "Certificate"):
        secrets[made["spec"]["secretName"]] = {"ca.crt", "tls.crt", "tls.key"}
    maps = {m["metadata"]["name"] for m in of_kind(manifests, "ConfigMap")}
    supplied = set(re.findall(r"'(\w{1,8})'", str(case.values))) | {"outrider-hub"}
    claims = {
        f"StatefulSet/{m['metadata']['name']}": {
            claim["metadata"]["name"] for claim in m["spec"].get("volumeClaimTemplates", ())
        }
        for m in of_kind(manifests, "StatefulSet")
    }
    for name, pod in pods(manifests):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        for container in containers(pod):
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted == set(volumes) | claims.get(name, set()), name
            for source in container.get("envFrom", ()):
                assert source["configMapRef"]["name"] in maps, name
        for volume in volumes.values():
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps, name
            secret = volume.get("secret")
            if secret and secret["secretName"] in secrets:
                keys = {item["key"] for item in secret.get("items", ())}
                assert keys <= secrets[secret["secretName"]], name
            elif secret:
                assert secret["secretName"] in supplied, (name, secret)


@every_case
def test_files_that_settings_name_are_mounted(case: Case) -> None:
    manifests = render(case)
    for name, pod in pods(manifests):
        tier = tier_of(pod)
        if tier not in CONFIGS:
            continue
        (container,) = containers(pod)
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        for key, value in settings(manifests, tier).items():
            if value.startswith(("/etc/", "/cache", "/models")):
                assert any(value.startswith(mount) for mount in mounts), (name, key, value)


@every_case
def test_services_reach_the_pods_of_their_tier_alone(case: Case) -> None:
    manifests = render(case)
    templates = list(pods(manifests))
    for service in of_kind(manifests, "Service"):
        selector = dict(service["spec"]["selector"])
        first_of_group = selector.pop("leaderworkerset.sigs.k8s.io/worker-index", None)
        found = [
            (name, pod)
            for name, pod in templates
            if selector.items() <= pod["metadata"]["labels"].items()
            and not (first_of_group == "0" and name.endswith(" worker"))
        ]
        assert len(found) == 1, (service["metadata"]["name"], [name for name, _ in found])
        ports = {port["name"] for port in containers(found[0][1])[0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    groups = of_kind(manifests, "LeaderWorkerSet")
    names = {service["metadata"]["name"] for service in of_kind(manifests, "Service")}
    # The controller makes a Service of the group's name.
    assert not names & {group["metadata"]["name"] for group in groups}


@every_case
def test_addresses_are_those_of_services_that_certificates_name(case: Case) -> None:
    manifests = render(case)
    env = settings(manifests, "orchestrator")
    names = certificate_names(manifests)
    for key, port_of in (("TARGETS", "target"), ("DRAFTS", "draft")):
        address = env[f"OUTRIDER_ORCHESTRATOR_{key}"]
        if not address:
            assert case.name == "no-drafts"
            continue
        scheme, _, rest = address.partition(":///")
        host, _, port = rest.rpartition(":")
        service = named(manifests, "Service", host.split(".")[0])
        assert service["spec"]["clusterIP"] == "None"
        assert int(port) in {p["port"] for p in service["spec"]["ports"]}
        assert port == settings(manifests, port_of)[f"OUTRIDER_{port_of.upper()}_PORT"]
        if scheme == "dns" and port_of in names:
            assert host in names[port_of] and f"*.{host}" in names[port_of]
        if port_of in names:
            assert env["OUTRIDER_ORCHESTRATOR_WORKER_TLS_NAME"] in names[port_of]
    if "redis" in names:
        assert re.search(r"@([^:]+):", env["OUTRIDER_ORCHESTRATOR_STORE_URL"])[1] in names["redis"]


def certificate_names(manifests: list[Manifest]) -> dict[str, set[str]]:
    """DNS names by tier, of the certificates that the chart sees to."""
    found = {
        tier_of(m): set(m["spec"]["dnsNames"])
        for m in of_kind(manifests, "Certificate")
        if not m["spec"].get("isCA")
    }
    for secret in of_kind(manifests, "Secret"):
        if "tls.crt" in secret["data"] and tier_of(secret) != "ca":
            found[tier_of(secret)] = set(names_in(secret))
    return found


def certificate(secret: Manifest, key: str = "tls.crt") -> x509.Certificate:
    return x509.load_pem_x509_certificate(base64.b64decode(secret["data"][key]))


def names_in(secret: Manifest) -> list[str]:
    extension = certificate(secret).extensions.get_extension_for_oid(
        ExtensionOID.SUBJECT_ALTERNATIVE_NAME
    )
    return list(extension.value.get_values_for_type(x509.DNSName))


def test_certificates_of_helm_are_of_one_ca_and_have_all_names() -> None:
    case = next(case for case in CASES if case.name == "self-signed")
    manifests = render(case)
    ca = certificate(named(manifests, "Secret", "demo-outrider-ca"))
    secrets = [m for m in of_kind(manifests, "Secret") if "ca.crt" in m["data"]]
    assert {tier_of(secret) for secret in secrets} == {"orchestrator", "draft", "target", "redis"}
    for secret in secrets:
        assert certificate(secret, "ca.crt") == ca
        certificate(secret).verify_directly_issued_by(ca)
    orchestrator = named(manifests, "Secret", "demo-outrider-orchestrator-tls")
    extension = certificate(orchestrator).extensions.get_extension_for_oid(
        ExtensionOID.SUBJECT_ALTERNATIVE_NAME
    )
    assert "llm.example.com" in names_in(orchestrator)
    addresses = extension.value.get_values_for_type(x509.IPAddress)
    assert {str(address) for address in addresses} == {"10.0.0.1", "::1"}


@every_case
def test_pods_have_the_time_that_draining_takes(case: Case) -> None:
    manifests = render(case)
    for name, pod in pods(manifests):
        tier = tier_of(pod)
        for container in containers(pod):
            if tier not in CONFIGS:
                continue
            env = settings(manifests, tier)
            drain = float(env[f"OUTRIDER_{tier.upper()}_DRAIN_S"])
            asleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
            if name.endswith(" worker"):  # Until the first rank has drained.
                leader = next(
                    p for n, p in pods(manifests) if n == name.replace("worker", "leader")
                )
                hook = leader["spec"]["containers"][0]["lifecycle"]["preStop"]
                assert asleep == hook["sleep"]["seconds"] + drain
                assert pod["spec"]["terminationGracePeriodSeconds"] > asleep
                continue
            # After draining an orchestrator frees what is left, for some seconds more.
            assert pod["spec"]["terminationGracePeriodSeconds"] >= drain + asleep + 10, name
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                port = str(container[probe]["grpc"]["port"])
                assert port == env[f"OUTRIDER_{tier.upper()}_HEALTH_PORT"], name
            startup = container["startupProbe"]
            allowed = startup["failureThreshold"] * startup["periodSeconds"]
            if tier == "orchestrator":
                assert allowed > float(env["OUTRIDER_ORCHESTRATOR_START_TIMEOUT_S"]), name


ARROWS = {
    ("anyone", "orchestrator", 50051),
    ("orchestrator", "target", 50053),
    ("orchestrator", "draft", 50052),
    ("target", "draft", 50052),
    ("orchestrator", "redis", 6379),
    *(("prometheus", tier, 9464) for tier in CONFIGS),
}
"""docs/design.md §4; a caller, and Prometheus."""


def test_network_policies_allow_the_arrows_of_the_design_and_nothing_else() -> None:
    arrows_in, arrows_out = arrows(render(Case("defaults")))
    assert arrows_in == ARROWS
    dns = {(tier, "dns", 53) for tier in (*CONFIGS, "test")}
    within = {arrow for arrow in ARROWS if arrow[0] not in ("anyone", "prometheus")}
    assert arrows_out == within | dns | {("test", "orchestrator", 50051)}


def test_groups_may_talk_within_their_tier_and_callers_can_be_named() -> None:
    by_name = {case.name: case for case in MATRIX}
    for found in arrows(render(by_name["groups"])):
        assert ("target", "target", 0) in found
    arrows_in, arrows_out = arrows(render(by_name["narrow-policies"]))
    assert ("anyone", "orchestrator", 50051) not in arrows_in
    assert {("apps", "orchestrator", 50051), ("test", "orchestrator", 50051)} <= arrows_in
    internet = {arrow for arrow in arrows_out if arrow[1] == "internet"}
    assert internet == {("draft", "internet", 443), ("target", "internet", 443)}
    assert ("orchestrator", "otel", 4317) in arrows_out


def arrows(manifests: list[Manifest]) -> tuple[set[Any], set[Any]]:
    """What policies let in, and let out: from, to, port (0: any)."""
    arrows_in, arrows_out = set(), set()
    for policy in of_kind(manifests, "NetworkPolicy"):
        spec = policy["spec"]
        tier = spec["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        for rule in spec.get("ingress", ()):
            arrows_in |= {(p, tier, n) for p in peers(rule.get("from")) for n in numbers(rule)}
        for rule in spec.get("egress", ()):
            arrows_out |= {(tier, p, n) for p in peers(rule.get("to")) for n in numbers(rule)}
    return arrows_in, arrows_out


def numbers(rule: Manifest) -> set[int]:
    return {port["port"] for port in rule.get("ports", [{"port": 0}])}


def peers(selectors: list[Manifest] | None) -> set[str]:
    if selectors is None:
        return {"anyone"}
    found = set()
    for selector in selectors:
        text = json.dumps(selector)
        if "ipBlock" in selector:
            found.add("internet")
        elif "monitoring" in text:
            found.add("prometheus")
        elif "kube-dns" in text:
            found.add("dns")
        else:
            (labels,) = (part["matchLabels"] for part in selector.values())
            found.add(labels.get("app.kubernetes.io/component") or next(iter(labels.values())))
    return found


@every_case
def test_every_pod_has_a_policy(case: Case) -> None:
    manifests = render(case)
    covered = {
        policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for policy in of_kind(manifests, "NetworkPolicy")
    }
    if case.name == "no-policies":
        assert not covered
    else:
        assert covered == {tier_of(pod) for _, pod in pods(manifests)}


@every_case
def test_scalers_scale_what_has_no_replicas_of_its_own(case: Case) -> None:
    manifests = render(case)
    scaled = set()
    for scaler in of_kind(manifests, "HorizontalPodAutoscaler", "ScaledObject"):
        reference = scaler["spec"]["scaleTargetRef"]
        workload = named(manifests, reference["kind"], reference["name"])
        assert workload["apiVersion"] == reference["apiVersion"]
        assert "replicas" not in workload["spec"]
        assert scaler["spec"].get("metrics") or scaler["spec"].get("triggers")
        scaled.add(reference["name"])
    for workload in of_kind(manifests, "Deployment", "StatefulSet", "LeaderWorkerSet"):
        if workload["metadata"]["name"] not in scaled:
            assert "replicas" in workload["spec"]


def test_pods_roll_when_their_settings_change_and_only_theirs() -> None:
    before = dict(pods(render(Case("defaults"))))
    changed = Case("changed", {"draft": {"settings": {"max_rows": 17}}})
    after = dict(pods(render(changed)))
    assert {name for name in before if before[name] != after[name]} == {
        "Deployment/demo-outrider-draft"
    }


def test_threads_follow_the_cpus_that_a_pod_may_use() -> None:
    for name, tier, expected in (
        ("defaults", "target", "4"),
        ("settings", "target", "3"),
        ("settings", "draft", "2"),
        ("pools", "target", None),
    ):
        case = next(case for case in CASES if case.name == name)
        env = settings(render(case), tier)
        assert env.get(f"OUTRIDER_{tier.upper()}_THREADS") == expected, name


def test_numbers_reach_services_as_they_were_written() -> None:
    case = next(case for case in CASES if case.name == "settings")
    env = settings(render(case), "orchestrator")
    assert env["OUTRIDER_ORCHESTRATOR_MAX_MESSAGE_BYTES"] == "16777216"
    assert env["OUTRIDER_ORCHESTRATOR_LEASE_S"] == "12.5"
    assert env["OUTRIDER_ORCHESTRATOR_LOG_JSON"] == "false"


def test_helm_test_asks_as_a_caller_would() -> None:
    from outrider.cli.__main__ import build_parser

    pod = named(render(Case("demo", profile="demo")), "Pod", "demo-outrider-test")
    command = containers(pod)[0]["command"]
    assert command[0] == "outrider"
    args = build_parser().parse_args(command[1:])
    assert args.address == "demo-outrider-orchestrator.outrider.svc.cluster.local:50051"
    assert args.ca_file and args.token_file and args.prompt, shlex.join(command)


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def test_certificates_come_from_cert_manager_where_the_cluster_has_it() -> None:
    with_it, without = render(case_of("cert-manager-found")), render(Case("defaults"))
    assert of_kind(with_it, "Certificate") and not of_kind(without, "Certificate")
    made = {m["metadata"]["name"] for m in of_kind(without, "Secret") if "tls.crt" in m["data"]}
    assert made == {m["spec"]["secretName"] for m in of_kind(with_it, "Certificate")}


@pytest.mark.parametrize("case", [Case("defaults"), Case("demo", profile="demo")], ids=str)
def test_a_bare_cluster_has_all_that_defaults_ask_for(case: Case) -> None:
    """No operator, no class of storage or ingress of a certain name, no value to fill in."""
    own = {"v1", "apps/v1", "policy/v1", "networking.k8s.io/v1"}
    assert {manifest["apiVersion"] for manifest in render(case)} <= own


@every_case
def test_workers_are_told_whose_calls_they_take(case: Case) -> None:
    manifests = render(case)
    names = certificate_names(manifests)
    for tier, callers in (("draft", ("orchestrator", "target")), ("target", ("orchestrator",))):
        allowed = settings(manifests, tier).get(f"OUTRIDER_{tier.upper()}_TLS_CLIENT_NAMES")
        if case.name in ("plaintext", "kv-store-without-tls", "any-certificate-of-the-ca"):
            assert allowed is None
            continue
        assert allowed and len(allowed.split(",")) == len(callers)
        for name, caller in zip(allowed.split(","), callers, strict=True):
            assert caller not in names or name in names[caller]


def test_callers_and_their_limits_reach_the_orchestrator() -> None:
    env = settings(render(case_of("quotas")), "orchestrator")
    config = load_config(OrchestratorConfig, [], env, prog="x", env_prefix="OUTRIDER_ORCHESTRATOR_")
    assert (config.calls_per_s, config.calls_burst, config.audit) == (2.5, 20, "all")
    callers = Callers.parse(config.caller_limits)
    assert callers.of("acme") == CallerLimits(8, 32, 2.5, Priority.HIGH)
    assert callers.of("whoever") == CallerLimits(2, None, 1.0, Priority.LOW)


def test_jwts_are_checked_as_the_values_say() -> None:
    manifests = render(case_of("jwts-besides-tokens"))
    env = settings(manifests, "orchestrator")
    found = {key.removeprefix("OUTRIDER_ORCHESTRATOR_"): value for key, value in env.items()}
    assert found["JWT_KEYS"] == "https://login.example.com:8443/keys"
    assert found["JWT_KEYS_CA"] == "/etc/outrider/jwt-ca/ca.crt" and found["AUTH_TOKEN_FILE"]
    assert (found["JWT_TENANT_CLAIM"], found["JWT_ALGORITHMS"]) == ("org", "ES256")
    _, arrows_out = arrows(manifests)
    assert {arrow for arrow in arrows_out if arrow[2] == 8443} == {
        ("orchestrator", "internet", 8443)
    }
    alone = settings(render(case_of("jwts-alone")), "orchestrator")
    assert "OUTRIDER_ORCHESTRATOR_AUTH_TOKEN_FILE" not in alone
    assert alone["OUTRIDER_ORCHESTRATOR_JWT_ISSUER"]
    by_file = render(case_of("jwts-by-a-key-set"))
    keys = settings(by_file, "orchestrator")["OUTRIDER_ORCHESTRATOR_JWT_KEYS"]
    assert keys == "/etc/outrider/jwt/keys.json"
    assert not of_kind(by_file, "Pod"), "a test without a token could only fail"


def test_traces_go_to_the_collector_that_values_name_and_pods_can_be_told_apart() -> None:
    manifests = render(case_of("traced"))
    for tier, workload in (("orchestrator", "Deployment"), ("target", "StatefulSet")):
        env = settings(manifests, tier)
        assert env[f"OUTRIDER_{tier.upper()}_OTLP_ENDPOINT"] == "https://collector.example.com:4318"
        pod = named(manifests, workload, f"demo-outrider-{tier}")["spec"]["template"]
        variables = {entry["name"]: entry for entry in containers(pod)[0]["env"]}
        assert "$(POD_NAME)" in variables["OTEL_RESOURCE_ATTRIBUTES"]["value"]
        headers = variables["OTEL_EXPORTER_OTLP_HEADERS"]["valueFrom"]["secretKeyRef"]
        assert headers == {"name": "h", "key": "headers"}
        assert variables["OTEL_EXPORTER_OTLP_CERTIFICATE"]["value"] == "/etc/outrider/otlp/ca.crt"
    assert settings(manifests, "orchestrator")["OUTRIDER_ORCHESTRATOR_TRACE_SAMPLE_RATE"] == "0.25"
    _, arrows_out = arrows(manifests)
    assert {a for a in arrows_out if a[2] == 4318} == {(tier, "anyone", 4318) for tier in CONFIGS}


def test_kv_blocks_have_a_store_that_their_tiers_alone_reach() -> None:
    manifests = render(case_of("kv-store"))
    config = named(manifests, "ConfigMap", "demo-outrider-kvstore")["data"]
    assert "maxmemory-policy allkeys-lru" in config["redis.conf"]
    assert "appendonly no" in config["redis.conf"] and "maxmemory 8gb" in config["redis.conf"]
    assert config["rights"].startswith("~outrider:kv:* ")
    for tier in ("draft", "target"):
        env = settings(manifests, tier)
        assert env[f"OUTRIDER_{tier.upper()}_KV_STORE_URL"] == (
            "rediss://outrider@demo-outrider-kvstore.outrider.svc.cluster.local:6379/0"
        )
        assert env[f"OUTRIDER_{tier.upper()}_KV_RESTORE"] == "always"
    arrows_in, arrows_out = arrows(manifests)
    within = {(tier, "kvstore", 6379) for tier in CONFIGS}
    assert {a for a in arrows_in if a[1] == "kvstore"} == within | {("exp", "kvstore", 6379)}
    assert {a for a in arrows_out if a[1] == "kvstore"} == within
    elsewhere = render(case_of("kv-store-elsewhere"))
    assert not [m for m in elsewhere if m["metadata"]["name"] == "demo-outrider-kvstore"]
    env = settings(elsewhere, "target")
    assert env["OUTRIDER_TARGET_KV_STORE_URL"] == "rediss://kv@kv.example.com:6390"
    assert env["OUTRIDER_TARGET_KV_STORE_CERT"] == "/etc/outrider/kv-store-tls/tls.crt"
    _, arrows_out = arrows(elsewhere)
    assert {a for a in arrows_out if a[2] in (6390, 6391)} == {
        ("target", "internet", 6390),
        ("orchestrator", "internet", 6391),
    }


def volume_of(manifests: list[Manifest], tier: str, name: str) -> Manifest:
    """The secret that a tier mounts under a name."""
    (found,) = (
        volume["secret"]
        for _, pod in pods(manifests)
        if tier_of(pod) == tier
        for volume in pod["spec"]["volumes"]
        if volume["name"] == name
    )
    return dict(found)


def test_orchestrators_read_the_index_of_kv_blocks_as_a_user_of_their_own() -> None:
    manifests = render(case_of("kv-store"))
    env = settings(manifests, "orchestrator")
    assert env["OUTRIDER_ORCHESTRATOR_KV_STORE_URL"] == (
        "rediss://orchestrator@demo-outrider-kvstore.outrider.svc.cluster.local:6379/0"
    )
    assert env["OUTRIDER_ORCHESTRATOR_KV_INDEX_WAIT_S"] == "0.01"
    assert not any(key.endswith(("_KV_RESTORE", "_WRITE_MIB_S")) for key in env)
    secret = "demo-outrider-kvstore"
    for case, tier, key in (
        (manifests, "orchestrator", (secret, "orchestratorPassword")),
        (manifests, "target", (secret, "password")),
        (render(case_of("kv-store-elsewhere")), "orchestrator", ("p", "orchestratorPassword")),
        (render(case_of("kv-store-elsewhere")), "target", ("p", "password")),
    ):
        volume = volume_of(case, tier, "kv-store")
        assert (volume["secretName"], volume["items"][0]["key"]) == key
        assert [item["path"] for item in volume["items"]] == ["password"]
    data = named(manifests, "Secret", secret)["data"]
    assert data["orchestratorPassword"] != data["password"]
    rights = named(manifests, "ConfigMap", secret)["data"]["orchestrator-rights"]
    assert rights.startswith("~outrider:kv:* ") and "+set" not in rights


def test_several_servers_are_reached_at_all_their_ports() -> None:
    manifests = render(case_of("sentinels"))
    _, arrows_out = arrows(manifests)
    assert {p for tier, _, p in arrows_out if tier == "orchestrator"} >= {26379, 26380, 6379}
    env = settings(manifests, "orchestrator")
    assert env["OUTRIDER_ORCHESTRATOR_STORE_URL"].endswith("/sessions/2?sentinel_user=asker")
    assert env["OUTRIDER_ORCHESTRATOR_STORE_CA"] == "/etc/outrider/store-tls/ca.crt"
    items = volume_of(manifests, "orchestrator", "store")["items"]
    keys = {item["key"]: item["path"] for item in items}
    assert keys == {"password": "password", "sentinels": "sentinel-password"}
    file = env["OUTRIDER_ORCHESTRATOR_STORE_SENTINEL_PASSWORD_FILE"]
    assert file == "/etc/outrider/store/sentinel-password"
    _, arrows_out = arrows(render(case_of("a-cluster")))
    at = {port for *arrow, port in arrows_out if arrow == ["orchestrator", "internet"]}
    assert at == {7000, 6379, 7001}


def test_who_may_ask_what_the_doctor_asks_is_a_value() -> None:
    name = "OUTRIDER_ORCHESTRATOR_ADMIN_CALLERS"
    assert settings(render(case_of("quotas")), "orchestrator")[name] == "ops,acme"
    assert name not in settings(render(case_of("defaults")), "orchestrator")


def test_every_autoscaler_asks_for_signals_that_metrics_make() -> None:
    """The default targets name signals, and KEDA's queries are those of the signals."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    signals = values["metrics"]["signals"]
    for tier in CONFIGS:
        assert set(values[tier]["autoscaling"]["targets"]) <= set(signals), tier
    used = {name for tier in CONFIGS for name in values[tier]["autoscaling"]["targets"]}
    assert used == set(signals)
    names: set[str] = set()
    for scaler in of_kind(render(case_of("keda")), "ScaledObject"):
        for trigger in scaler["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            assert "$selector" not in query and 'app_kubernetes_io_instance="demo"' in query
            assert not faults(query)
            names |= {each.name for each in asked(query)}
    assert len(names) >= 6


PAGE = (ROOT / "docs" / "operations.md").read_text()


def test_each_alert_has_its_section_in_the_runbook_and_each_section_its_alert() -> None:
    alerts = {alert["alert"] for alert in yaml.safe_load((CHART / "files/alerts.yaml").read_text())}
    sections = re.findall(r"^### (Outrider\w+)\n(.*?)(?=^##)", PAGE + "\n##", re.M | re.S)
    assert len(sections) == len({name for name, _ in sections})
    assert {name for name, _ in sections} == alerts
    for name, text in sections:
        assert "**Means**" in text and "**Do**" in text and len(text) > 200, name


def test_each_alert_links_to_its_section() -> None:
    (rules,) = of_kind(render(case_of("monitored")), "PrometheusRule")
    found = [
        rule for group in rules["spec"]["groups"] for rule in group["rules"] if "alert" in rule
    ]
    for rule in found:
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"


def test_the_runbook_names_values_and_metrics_that_there_are() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    named = set(re.findall(r"\b(?:outrider|gen_ai)_[a-z_]+", PAGE)) - {"outrider_scaling_"}
    assert named <= set(prometheus_names()), named - set(prometheus_names())
    for path in re.findall(r"`([a-z][A-Za-z]*(?:\.[a-zA-Z]+)+)(?::[^`]*)?`", PAGE):
        parts = path.split(".")
        if parts[0] not in values or parts[-1] in ("crt", "key", "yaml", "md", "txt"):
            continue
        node = values
        for part in parts:
            assert isinstance(node, dict) and (part in node or not node), path
            node = node.get(part)


def chart_queries() -> list[str]:
    """All PromQL of dashboard, alerts and signals."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    dashboard = json.loads((CHART / "files" / "dashboard.json").read_text())
    found = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    alerts = yaml.safe_load((CHART / "files/alerts.yaml").read_text())
    return [*found, *(alert["expr"] for alert in alerts), *values["metrics"]["signals"].values()]


def test_dashboard_alerts_and_signals_ask_for_what_there_is() -> None:
    """Prometheus takes them, and metrics, labels and values are those of the catalog."""
    found = chart_queries()
    assert len(found) > 60 and not [fault for query in found for fault in faults(query)]
    assert len({each.name for query in found for each in asked(query)}) > 25
    dashboard = json.loads((CHART / "files" / "dashboard.json").read_text())
    variables = [v["query"]["query"] for v in dashboard["templating"]["list"][1:]]
    assert variables and all(v.startswith("label_values(outrider_streams") for v in variables)
    assert "outrider_streams" in prometheus_names()


def test_the_examples_of_the_metrics_page_are_queries() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    found = re.findall(r"^\| [^|]+ \| `([^`]*(?:outrider|gen_ai)_[^`]*)` \|$", page, re.MULTILINE)
    # They are given without their ranges.
    ranged = [re.sub(r"(rate\([a-z_]+(?:\{[^}]*\})?)\)", r"\1[5m])", query) for query in found]
    assert len(found) > 8 and not [
        fault for query in ranged for fault in faults(query.replace("instance", "pod"))
    ]


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("sum(rate(outrider_rounds_total[5m])", "unclosed"),
        ("rate(outrider_rounds_total)", "expected type"),
        ("sum(outrider_strems)", "is no metric"),
        ('outrider_works{tier="draft",stat="waiting"}', "no label stat"),
        ('outrider_works{state="wating"}', "never wating"),
        ('rate(outrider_requests_total{status=~"OK|FINE"}[5m])', "never FINE"),
        ("sum by (kind) (outrider_works)", "no label kind"),
        ("sum by (le) (outrider_works)", "no label le"),
        ("1", "nothing"),
    ],
)
def test_queries_for_what_there_is_not_are_noticed(query: str, fault: str) -> None:
    [found] = faults(query)
    assert fault in found


def test_signals_are_recorded_under_the_names_that_scalers_ask_for() -> None:
    scaled = next(case for case in CASES if case.name == "hpa")
    wanted = {
        metric["external"]["metric"]["name"]
        for scaler in of_kind(render(scaled), "HorizontalPodAutoscaler")
        for metric in scaler["spec"]["metrics"]
    }
    monitored = next(case for case in CASES if case.name == "monitored")
    (rules,) = of_kind(render(monitored), "PrometheusRule")
    recorded = {
        rule["record"] for group in rules["spec"]["groups"] for rule in group["rules"]
        if "record" in rule
    }  # fmt: skip
    assert wanted <= recorded and len(wanted) == 6


def test_a_release_without_drafts_is_not_told_that_it_has_none() -> None:
    case = next(case for case in CASES if case.name == "no-drafts")
    (rules,) = of_kind(render(case), "PrometheusRule")
    alerts = {rule.get("alert") for group in rules["spec"]["groups"] for rule in group["rules"]}
    assert "OutriderNoTarget" in alerts and "OutriderNoDraft" not in alerts
