{{/* Certificates: who has one, and for which names. */}}

{{/* Where certificates come from. `auto` stays with what it was as the release was installed: a
cluster that gets cert-manager later does not change CAs under it. */}}
{{- define "outrider.tlsMode" -}}
{{- $mode := .Values.tls.mode -}}
{{- if eq $mode "auto" -}}
{{- $ca := lookup "v1" "Secret" .Release.Namespace (printf "%s-ca" (include "outrider.fullname" .)) | default dict -}}
{{- $release := get (($ca.metadata | default dict).annotations | default dict) "meta.helm.sh/release-name" -}}
{{- $mode = ternary "certManager" "selfSigned" (and (.Capabilities.APIVersions.Has "cert-manager.io/v1") (ne $release .Release.Name)) -}}
{{- end -}}
{{- $mode -}}
{{- end -}}

{{/* "true" where there is TLS. */}}
{{- define "outrider.tls" -}}
{{- if ne .Values.tls.mode "none" }}true{{ end -}}
{{- end -}}

{{/* Name of the secret with a tier's certificate: a dict of `root` and `tier`. */}}
{{- define "outrider.tlsSecret" -}}
{{- $supplied := get .root.Values.tls.secrets .tier -}}
{{- if $supplied -}}
{{- $supplied -}}
{{- else if eq (include "outrider.tlsMode" .root) "secrets" -}}
{{- fail (printf "tls.secrets.%s is needed in tls.mode secrets" .tier) -}}
{{- else -}}
{{- include "outrider.name" . }}-tls
{{- end -}}
{{- end -}}

{{/* The tiers whose certificates the chart sees to, as JSON. */}}
{{- define "outrider.certified" -}}
{{- $tiers := list -}}
{{- if has (include "outrider.tlsMode" .) (list "certManager" "selfSigned") -}}
{{- range $tier := list "orchestrator" "draft" "target" "redis" "kvStore" -}}
{{- $isStore := has $tier (list "redis" "kvStore") -}}
{{- if and (not (get $.Values.tls.secrets $tier)) (or (not $isStore) (include "outrider.ownStore" (dict "root" $ "tier" $tier))) -}}
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

{{/* The names of those that a tier of workers takes calls from, as its clients' certificates have
them: a list, as JSON. */}}
{{- define "outrider.clientNames" -}}
{{- $names := list (include "outrider.host" (dict "root" .root "service" (include "outrider.name" (dict "root" .root "tier" "orchestrator")))) -}}
{{- if eq .tier "draft" -}}
{{- $names = append $names (include "outrider.host" (dict "root" .root "service" (include "outrider.workers" (dict "root" .root "tier" "target")))) -}}
{{- end -}}
{{- toJson $names -}}
{{- end -}}
