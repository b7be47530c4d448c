{{/* The label matchers of the release's series, as pod and service monitors make them. */}}
{{- define "outrider.series" -}}
namespace={{ .Release.Namespace | quote }},app_kubernetes_io_instance={{ .Release.Name | quote }}
{{- end -}}

{{/* The PromQL of a signal: a dict of `root` and `signal`. */}}
{{- define "outrider.signalQuery" -}}
{{- $query := get .root.Values.metrics.signals .signal -}}
{{- if not $query -}}
{{- fail (printf "autoscaling by %q: metrics.signals has %s" .signal (.root.Values.metrics.signals | keys | sortAlpha | join ", ")) -}}
{{- end -}}
{{- $query | replace "$selector" (include "outrider.series" .root) -}}
{{- end -}}

{{/* The name that a signal is recorded by. */}}
{{- define "outrider.signalName" -}}
outrider_scaling_{{ . | snakecase }}
{{- end -}}

{{/* Metadata with labels by which an operator finds the object: a dict as for outrider.metadata, with `more`. */}}
{{- define "outrider.monitorMetadata" -}}
{{- $metadata := include "outrider.metadata" . | fromYaml -}}
{{- $_ := set $metadata "labels" (merge (dict) .more $metadata.labels) -}}
{{- toYaml $metadata -}}
{{- end -}}
