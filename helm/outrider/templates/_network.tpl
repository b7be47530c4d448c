{{/* Who may reach a tier, and whom it may reach: a dict of `root` and `tier`. */}}

{{- define "outrider.ingressRules" -}}
{{- $values := .root.Values -}}
{{- $policy := $values.networkPolicy -}}
{{- $ports := $values.ports -}}
{{- $group := and (eq $values.target.kind "LeaderWorkerSet") (gt (int $values.target.group.size) 1) -}}
{{- if eq .tier "orchestrator" }}
- ports:
    - port: {{ $ports.orchestrator }}
  {{- if $policy.callers }}
  from:
    {{- include "outrider.peer" (dict "root" .root "tier" "test") | nindent 4 }}
    {{- toYaml $policy.callers | nindent 4 }}
  {{- end }}
{{- else if eq .tier "draft" }}
- ports:
    - port: {{ $ports.draft }}
  from:
    {{- include "outrider.peer" (dict "root" .root "tier" "orchestrator") | nindent 4 }}
    {{- include "outrider.peer" (dict "root" .root "tier" "target") | nindent 4 }}
{{- else if eq .tier "target" }}
- ports:
    - port: {{ $ports.target }}
  from:
    {{- include "outrider.peer" (dict "root" .root "tier" "orchestrator") | nindent 4 }}
{{- if $group }}
# The ranks of a group meet on ports that they draw.
- from:
    {{- include "outrider.peer" . | nindent 4 }}
{{- end }}
{{- else if has .tier (list "redis" "kvStore") }}
- ports:
    - port: 6379
  from:
    {{- range $tier := ternary (list "orchestrator") (prepend $values.kvStore.tiers "orchestrator") (eq .tier "redis") }}
    {{- include "outrider.peer" (dict "root" $.root "tier" $tier) | nindent 4 }}
    {{- end }}
    {{- with $policy.storeClients }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- if and $values.metrics.enabled (has .tier (list "orchestrator" "draft" "target")) }}
- ports:
    - port: {{ $values.metrics.port }}
  from:
    {{- toYaml $policy.prometheus | nindent 4 }}
{{- end }}
{{- end -}}

{{- define "outrider.egressRules" -}}
{{- $values := .root.Values -}}
{{- $policy := $values.networkPolicy -}}
{{- $ports := $values.ports -}}
{{- $group := and (eq $values.target.kind "LeaderWorkerSet") (gt (int $values.target.group.size) 1) -}}
{{- if not (has .tier (list "redis" "kvStore")) }}
- ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
  to:
    {{- toYaml $policy.dns | nindent 4 }}
{{- end }}
{{- if has .tier (list "orchestrator" "draft" "target") }}
{{- include "outrider.urlRule" (dict "url" $values.telemetry.otlp.endpoint "peers" $policy.collector) }}
{{- end }}
{{- if eq .tier "orchestrator" }}
- ports:
    - port: {{ $ports.target }}
  to:
    {{- include "outrider.peer" (dict "root" .root "tier" "target") | nindent 4 }}
- ports:
    - port: {{ $ports.draft }}
  to:
    {{- include "outrider.peer" (dict "root" .root "tier" "draft") | nindent 4 }}
{{- include "outrider.storeRule" (dict "root" .root "tier" "redis") }}
{{- if $values.auth.jwt.issuer }}
{{- include "outrider.urlRule" (dict "url" $values.auth.jwt.keysUrl "peers" $policy.issuer) }}
{{- end }}
{{- if eq $values.discovery "kubernetes" }}
- ports:
    {{- range $policy.apiServerPorts }}
    - port: {{ . }}
    {{- end }}
  to:
    {{- toYaml $policy.apiServer | nindent 4 }}
{{- end }}
{{- else if eq .tier "target" }}
- ports:
    - port: {{ $ports.draft }}
  to:
    {{- include "outrider.peer" (dict "root" .root "tier" "draft") | nindent 4 }}
{{- if $group }}
- to:
    {{- include "outrider.peer" . | nindent 4 }}
{{- end }}
{{- else if eq .tier "test" }}
- ports:
    - port: {{ $ports.orchestrator }}
  to:
    {{- include "outrider.peer" (dict "root" .root "tier" "orchestrator") | nindent 4 }}
{{- end }}
{{- if include "outrider.usesKvStore" . }}
{{- include "outrider.storeRule" (dict "root" .root "tier" "kvStore" "client" .tier) }}
{{- end }}
{{- if and $policy.modelHub (has .tier (list "draft" "target")) }}
- ports:
    - port: 443
  to:
    - ipBlock:
        cidr: 0.0.0.0/0
        except: [10.0.0.0/8, 100.64.0.0/10, 169.254.0.0/16, 172.16.0.0/12, 192.168.0.0/16]
    - ipBlock:
        cidr: 2000::/3
{{- end }}
{{- end -}}

{{/* The way to a store: a dict of `root`, its `tier` and the `client`. */}}
{{- define "outrider.storeRule" -}}
{{- $external := (get .root.Values .tier).external }}
{{- if include "outrider.ownStore" . }}
- ports:
    - port: 6379
  to:
    {{- include "outrider.peer" . | nindent 4 }}
{{- else }}
- ports:
    {{- range include "outrider.storePorts" . | fromJsonArray }}
    - port: {{ . }}
    {{- end }}
  {{- with $external.peers }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The way to a URL's port, of `peers` where there are some; nothing without a URL. */}}
{{- define "outrider.urlRule" -}}
{{- if .url }}
{{- $parts := urlParse .url }}
{{- $port := regexFind ":[0-9]+$" $parts.host | trimPrefix ":" }}
- ports:
    - port: {{ $port | default (ternary "443" "80" (eq $parts.scheme "https")) }}
  {{- with .peers }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The pods of a tier as a peer of a network policy. */}}
{{- define "outrider.peer" -}}
- podSelector:
    matchLabels:
      {{- include "outrider.selector" . | nindent 6 }}
{{- end -}}
