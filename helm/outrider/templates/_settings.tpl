{{/* The settings of a tier, as its environment: what is no secret. A dict of `root` and `tier`. */}}

{{- define "outrider.settings" -}}
{{- $values := .root.Values -}}
{{- $own := get $values .tier -}}
{{- $tls := include "outrider.tls" .root -}}
{{- $settings := dict
  "host" $values.listenHost
  "port" (get $values.ports .tier)
  "health_port" $values.ports.health
  "drain_s" $own.drainSeconds
  "audit" $values.audit.level
-}}
{{- if $tls -}}
{{- $_ := set $settings "tls_cert" "/etc/outrider/tls/tls.crt" -}}
{{- $_ := set $settings "tls_key" "/etc/outrider/tls/tls.key" -}}
{{- if or (ne .tier "orchestrator") $values.tls.requireClientCertificate -}}
{{- $_ := set $settings "tls_client_ca" "/etc/outrider/tls/ca.crt" -}}
{{- end -}}
{{- end -}}
{{- if $values.metrics.enabled -}}
{{- $_ := set $settings "metrics_address" (printf "%s:%d" $values.listenHost (int $values.metrics.port)) -}}
{{- end -}}
{{- with $values.telemetry.otlp.endpoint -}}
{{- $_ := set $settings "otlp_endpoint" . -}}
{{- $_ := set $settings "otlp_protocol" $values.telemetry.otlp.protocol -}}
{{- end -}}
{{- if eq .tier "orchestrator" -}}
{{- $settings = merge $settings (include "outrider.orchestratorSettings" .root | fromJson) -}}
{{- else -}}
{{- $settings = merge $settings (include "outrider.workerSettings" . | fromJson) -}}
{{- end -}}
{{- $prefix := printf "OUTRIDER_%s_" (upper .tier) -}}
{{- range $name, $value := merge (dict) $own.settings $settings }}
{{ $prefix }}{{ upper $name }}: {{ include "outrider.text" $value | quote }}
{{- end }}
{{- end -}}

{{- define "outrider.orchestratorSettings" -}}
{{- $tls := include "outrider.tls" . -}}
{{- $settings := dict
  "targets" (include "outrider.address" (dict "root" . "tier" "target"))
  "drafts" (include "outrider.address" (dict "root" . "tier" "draft"))
  "store_start_timeout_s" .Values.orchestrator.startupSeconds
  "start_timeout_s" .Values.orchestrator.startupSeconds
-}}
{{- range $name, $value := include "outrider.storeAccess" (dict "root" . "tier" "redis" "folder" "store") | fromJson -}}
{{- $_ := set $settings (printf "store_%s" $name) $value -}}
{{- end -}}
{{- $settings = merge $settings (include "outrider.callerSettings" . | fromJson) -}}
{{- $scope := dict "root" . "tier" "orchestrator" -}}
{{- if include "outrider.usesKvStore" $scope -}}
{{- $settings = merge $settings (include "outrider.kvStoreSettings" $scope | fromJson) -}}
{{- end -}}
{{- if .Values.telemetry.otlp.endpoint -}}
{{- $_ := set $settings "trace_sample_rate" .Values.telemetry.traces.sampleRate -}}
{{- $_ := set $settings "trace_every" .Values.telemetry.traces.everyRounds -}}
{{- end -}}
{{- if $tls -}}
{{- $_ := set $settings "worker_ca" "/etc/outrider/tls/ca.crt" -}}
{{- $_ := set $settings "worker_cert" "/etc/outrider/tls/tls.crt" -}}
{{- $_ := set $settings "worker_key" "/etc/outrider/tls/tls.key" -}}
{{- $_ := set $settings "worker_tls_name" (include "outrider.workersName" .) -}}
{{- end -}}
{{- if and $tls .Values.tls.publicSecret -}}
{{- $_ := set $settings "tls_cert" "/etc/outrider/public-tls/tls.crt" -}}
{{- $_ := set $settings "tls_key" "/etc/outrider/public-tls/tls.key" -}}
{{- end -}}
{{- if .Values.auth.workers.enabled -}}
{{- $_ := set $settings "worker_token_file" "/etc/outrider/workers/token" -}}
{{- end -}}
{{- toJson $settings -}}
{{- end -}}

{{/* What an orchestrator is told of its callers, as JSON. */}}
{{- define "outrider.callerSettings" -}}
{{- $settings := dict -}}
{{- if .Values.auth.callers.enabled -}}
{{- $_ := set $settings "auth_token_file" "/etc/outrider/callers/tokens" -}}
{{- end -}}
{{- with .Values.auth.adminCallers -}}
{{- $_ := set $settings "admin_callers" . -}}
{{- end -}}
{{- with .Values.auth.jwt -}}
{{- if .issuer -}}
{{- if not .audience -}}
{{- fail "auth.jwt.issuer needs auth.jwt.audience: a JWT that is for someone else opens nothing here" -}}
{{- end -}}
{{- if eq (empty .keysUrl) (empty .keysSecret) -}}
{{- fail "auth.jwt.issuer needs one of auth.jwt.keysUrl and auth.jwt.keysSecret" -}}
{{- end -}}
{{- $_ := set $settings "jwt_issuer" .issuer -}}
{{- $_ := set $settings "jwt_audience" .audience -}}
{{- $_ := set $settings "jwt_keys" (.keysUrl | default (printf "/etc/outrider/jwt/%s" .keysKey)) -}}
{{- if .caSecret -}}
{{- $_ := set $settings "jwt_keys_ca" "/etc/outrider/jwt-ca/ca.crt" -}}
{{- end -}}
{{- $_ := set $settings "jwt_tenant_claim" .tenantClaim -}}
{{- $_ := set $settings "jwt_algorithms" .algorithms -}}
{{- $_ := set $settings "jwt_leeway_s" .leewaySeconds -}}
{{- $_ := set $settings "jwt_refresh_s" .refreshSeconds -}}
{{- end -}}
{{- end -}}
{{- with .Values.quotas -}}
{{- if .callsPerSecond -}}
{{- $_ := set $settings "calls_per_s" .callsPerSecond -}}
{{- $_ := set $settings "calls_burst" .callsBurst -}}
{{- end -}}
{{- $limits := list -}}
{{- range $name, $caller := .callers -}}
{{- $limit := $name -}}
{{- range $key := keys $caller | sortAlpha -}}
{{- $limit = printf "%s:%s=%s" $limit $key (include "outrider.text" (get $caller $key)) -}}
{{- end -}}
{{- $limits = append $limits $limit -}}
{{- end -}}
{{- if $limits -}}
{{- $_ := set $settings "caller_limits" $limits -}}
{{- end -}}
{{- end -}}
{{- toJson $settings -}}
{{- end -}}

{{/* Where the workers of a tier are, as the orchestrator's setting has it. */}}
{{- define "outrider.address" -}}
{{- $service := include "outrider.workers" . -}}
{{- $port := int (get .root.Values.ports .tier) -}}
{{- if and (eq .tier "draft") (not (include "outrider.hasDrafts" .root)) -}}
{{- else if eq .root.Values.discovery "kubernetes" -}}
{{- printf "kubernetes:///%s.%s:%d" $service .root.Release.Namespace $port -}}
{{- else -}}
{{- printf "dns:///%s:%d" (include "outrider.host" (dict "root" .root "service" $service)) $port -}}
{{- end -}}
{{- end -}}

{{- define "outrider.hasDrafts" -}}
{{- if or (gt (int .Values.draft.replicas) 0) (ne .Values.draft.autoscaling.kind "none") }}true{{ end -}}
{{- end -}}

{{- define "outrider.workerSettings" -}}
{{- $values := .root.Values -}}
{{- $own := get $values .tier -}}
{{- $settings := dict "model" $own.model.reference "cache_dir" "/cache" -}}
{{- with $own.model.name -}}
{{- $_ := set $settings "model_name" . -}}
{{- end -}}
{{- if not $own.gpu.count -}}
{{- with include "outrider.threads" $own.resources -}}
{{- $_ := set $settings "threads" (int .) -}}
{{- end -}}
{{- end -}}
{{- if $values.auth.workers.enabled -}}
{{- $_ := set $settings "auth_token_file" (printf "/etc/outrider/workers/%s" $values.auth.workers.acceptedKey) -}}
{{- end -}}
{{- if and (include "outrider.tls" .root) $values.tls.checkClientNames -}}
{{- $_ := set $settings "tls_client_names" (include "outrider.clientNames" . | fromJsonArray) -}}
{{- end -}}
{{- if include "outrider.usesKvStore" . -}}
{{- $settings = merge $settings (include "outrider.kvStoreSettings" . | fromJson) -}}
{{- end -}}
{{- if eq .tier "target" -}}
{{- if gt (int $own.group.tensorParallel) 1 -}}
{{- $_ := set $settings "tensor_parallel" $own.group.tensorParallel -}}
{{- $_ := set $settings "group_start_s" $own.startupSeconds -}}
{{- if gt (int $own.group.size) 1 -}}
{{- $_ := set $settings "group_token_file" "/etc/outrider/workers/token" -}}
{{- end -}}
{{- end -}}
{{- if include "outrider.tls" .root -}}
{{- $_ := set $settings "draft_ca" "/etc/outrider/tls/ca.crt" -}}
{{- $_ := set $settings "draft_cert" "/etc/outrider/tls/tls.crt" -}}
{{- $_ := set $settings "draft_key" "/etc/outrider/tls/tls.key" -}}
{{- $_ := set $settings "draft_tls_name" (include "outrider.workersName" .root) -}}
{{- end -}}
{{- if $values.auth.workers.enabled -}}
{{- $_ := set $settings "draft_token_file" "/etc/outrider/workers/token" -}}
{{- end -}}
{{- end -}}
{{- toJson $settings -}}
{{- end -}}

{{/* What a tier is told of the store of KV blocks, as JSON. */}}
{{- define "outrider.kvStoreSettings" -}}
{{- $own := .root.Values.kvStore -}}
{{- if and (has "target" $own.tiers) (gt (int .root.Values.target.group.tensorParallel) 1) -}}
{{- fail "kvStore.tiers: KV of a target that is sharded over ranks cannot be kept in a store" -}}
{{- end -}}
{{- $settings := dict "kv_store_ttl_s" $own.ttlSeconds -}}
{{- if eq .tier "orchestrator" -}}
{{- $_ := set $settings "kv_index_wait_s" $own.indexWaitSeconds -}}
{{- else -}}
{{- $_ := set $settings "kv_store_timeout_s" $own.timeoutSeconds -}}
{{- $_ := set $settings "kv_store_write_mib_s" $own.writeMibPerSecond -}}
{{- $_ := set $settings "kv_restore" $own.restore -}}
{{- end -}}
{{- range $name, $value := include "outrider.storeAccess" (dict "root" .root "tier" "kvStore" "client" .tier "folder" "kv-store") | fromJson -}}
{{- $_ := set $settings (printf "kv_store_%s" $name) $value -}}
{{- end -}}
{{- toJson $settings -}}
{{- end -}}

{{/* As many CPUs as a pod may use: it sees all those of its node. Empty where it has no limit. */}}
{{- define "outrider.threads" -}}
{{- with (.limits | default dict).cpu -}}
{{- $text := toString . -}}
{{- if hasSuffix "m" $text -}}
{{- divf (trimSuffix "m" $text) 1000 | ceil | int -}}
{{- else -}}
{{- $text | float64 | ceil | int -}}
{{- end -}}
{{- end -}}
{{- end -}}
