{{/* The settings of a tier, as its environment: what is no secret. A dict of `root` and `tier`. */}}

{{- define "outrider.settings" -}}
{{- $values := .root.Values -}}
{{- $own := get $values .tier -}}
{{- $tls := ne $values.tls.mode "none" -}}
{{- $settings := dict
  "host" $values.listenHost
  "port" (get $values.ports .tier)
  "health_port" $values.ports.health
  "drain_s" $own.drainSeconds
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
{{- $tls := ne .Values.tls.mode "none" -}}
{{- $settings := dict
  "targets" (include "outrider.address" (dict "root" . "tier" "target"))
  "drafts" (include "outrider.address" (dict "root" . "tier" "draft"))
  "store_url" (include "outrider.storeUrl" .)
  "start_timeout_s" .Values.orchestrator.startupSeconds
-}}
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
{{- if .Values.auth.callers.enabled -}}
{{- $_ := set $settings "auth_token_file" "/etc/outrider/callers/tokens" -}}
{{- end -}}
{{- if .Values.auth.workers.enabled -}}
{{- $_ := set $settings "worker_token_file" "/etc/outrider/workers/token" -}}
{{- end -}}
{{- if include "outrider.storePasswordSecret" . -}}
{{- $_ := set $settings "store_password_file" "/etc/outrider/store/password" -}}
{{- end -}}
{{- if hasPrefix "rediss://" $settings.store_url -}}
{{- $folder := ternary "tls" "store-tls" .Values.redis.enabled -}}
{{- if or .Values.redis.enabled .Values.redis.external.tlsSecret -}}
{{- $_ := set $settings "store_ca" (printf "/etc/outrider/%s/ca.crt" $folder) -}}
{{- end -}}
{{- if or .Values.redis.enabled .Values.redis.external.clientCertificate -}}
{{- $_ := set $settings "store_cert" (printf "/etc/outrider/%s/tls.crt" $folder) -}}
{{- $_ := set $settings "store_key" (printf "/etc/outrider/%s/tls.key" $folder) -}}
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
{{- $_ := set $settings "auth_token_file" "/etc/outrider/workers/token" -}}
{{- end -}}
{{- if eq .tier "target" -}}
{{- if gt (int $own.group.tensorParallel) 1 -}}
{{- $_ := set $settings "tensor_parallel" $own.group.tensorParallel -}}
{{- $_ := set $settings "group_start_s" $own.startupSeconds -}}
{{- if gt (int $own.group.size) 1 -}}
{{- $_ := set $settings "group_token_file" "/etc/outrider/workers/token" -}}
{{- end -}}
{{- end -}}
{{- if ne $values.tls.mode "none" -}}
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

{{- define "outrider.storeUrl" -}}
{{- if .Values.redis.enabled -}}
{{- $host := include "outrider.host" (dict "root" . "service" (include "outrider.name" (dict "root" . "tier" "redis"))) -}}
{{- $scheme := ternary "redis" "rediss" (eq .Values.tls.mode "none") -}}
{{- printf "%s://outrider@%s:6379/0" $scheme $host -}}
{{- else -}}
{{- required "redis.external.url is needed where redis.enabled is false" .Values.redis.external.url -}}
{{- end -}}
{{- end -}}

{{/* Name of the secret with the store's password; empty where there is none. */}}
{{- define "outrider.storePasswordSecret" -}}
{{- if .Values.redis.enabled -}}
{{- .Values.redis.existingSecret | default (include "outrider.name" (dict "root" . "tier" "redis")) -}}
{{- else -}}
{{- .Values.redis.external.passwordSecret -}}
{{- end -}}
{{- end -}}
