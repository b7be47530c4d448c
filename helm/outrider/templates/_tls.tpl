{{/* Certificates: who has one, and for which names. */}}

{{/* Name of the secret with a tier's certificate: a dict of `root` and `tier`. */}}
{{- define "outrider.tlsSecret" -}}
{{- $supplied := get .root.Values.tls.secrets .tier -}}
{{- if $supplied -}}
{{- $supplied -}}
{{- else if eq .root.Values.tls.mode "secrets" -}}
{{- fail (printf "tls.secrets.%s is needed in tls.mode secrets" .tier) -}}
{{- else -}}
{{- include "outrider.name" . }}-tls
{{- end -}}
{{- end -}}

{{/* The tiers whose certificates the chart sees to, as JSON. */}}
{{- define "outrider.certified" -}}
{{- $tiers := list -}}
{{- if has .Values.tls.mode (list "certManager" "selfSigned") -}}
{{- range $tier := list "orchestrator" "draft" "target" "redis" -}}
{{- if and (not (get $.Values.tls.secrets $tier)) (or (ne $tier "redis") $.Values.redis.enabled) -}}
{{- $tiers = append $tiers $tier -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $tiers -}}
{{- end -}}

{{/* The name that all workers' certificates have: workers are found by IP address. */}}
{{- define "outrider.workersName" -}}
{{- include "outrider.host" (dict "root" . "service" (printf "%s-workers" (include "outrider.fullname" .))) -}}
{{- end -}}

{{/* The DNS names of a tier's certificate, as JSON: its Service's, however much of them a client
uses, those of the pods behind a headless one, and that of all workers. */}}
{{- define "outrider.certificateNames" -}}
{{- $values := .root.Values -}}
{{- $worker := has .tier (list "draft" "target") -}}
{{- $service := include (ternary "outrider.workers" "outrider.name" $worker) . -}}
{{- $namespace := .root.Release.Namespace -}}
{{- $full := include "outrider.host" (dict "root" .root "service" $service) -}}
{{- $names := list $service (printf "%s.%s" $service $namespace) (printf "%s.%s.svc" $service $namespace) $full -}}
{{- if $worker -}}
{{- $names = concat $names (list (printf "*.%s" $full) (include "outrider.workersName" .root)) -}}
{{- end -}}
{{- if eq .tier "orchestrator" -}}
{{- range $name := $values.tls.extraNames -}}
{{- if not (regexMatch "^[0-9.]+$|:" $name) -}}
{{- $names = append $names $name -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $names -}}
{{- end -}}

{{/* Its IP addresses, as JSON. */}}
{{- define "outrider.certificateAddresses" -}}
{{- $addresses := list -}}
{{- if eq .tier "orchestrator" -}}
{{- range $name := .root.Values.tls.extraNames -}}
{{- if regexMatch "^[0-9.]+$|:" $name -}}
{{- $addresses = append $addresses $name -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $addresses -}}
{{- end -}}
