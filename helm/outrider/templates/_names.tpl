{{/* Names, labels, images. Most take a dict of `root` (the chart's scope) and `tier`. */}}

{{- define "outrider.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Name of a tier's workload, and of most of what belongs to it. */}}
{{- define "outrider.name" -}}
{{- include "outrider.fullname" .root }}-{{ lower .tier -}}
{{- end -}}

{{/* Name of the headless Service of a tier of workers. A LeaderWorkerSet makes a Service of its own
name for the pods of its groups, so this one has another. */}}
{{- define "outrider.workers" -}}
{{- include "outrider.name" . }}s
{{- end -}}

{{/* The name of a Service inside of the cluster: a dict of `root` and `service`. */}}
{{- define "outrider.host" -}}
{{- printf "%s.%s.svc.%s" .service .root.Release.Namespace .root.Values.clusterDomain -}}
{{- end -}}

{{- define "outrider.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ lower .tier }}
{{- end -}}

{{/* Labels of pods: nothing that a new chart changes, which would roll them. */}}
{{- define "outrider.podLabels" -}}
{{ include "outrider.selector" . }}
app.kubernetes.io/part-of: outrider
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "outrider.labels" -}}
{{ include "outrider.podLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name (.root.Chart.Version | replace "+" "_") }}
{{- end -}}

{{/* The metadata of an object: a dict of `root`, `tier`, `name` and, where it has some, `annotations`. */}}
{{- define "outrider.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "outrider.labels" . | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "outrider.image" -}}
{{- $image := (get .root.Values .tier).image -}}
{{- $registry := get $image "registry" | default .root.Values.image.registry -}}
{{- $name := printf "%s/%s" $registry $image.repository -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else if has .tier (list "redis" "kvStore") -}}
{{- printf "%s:%s" $name $image.tag -}}
{{- else -}}
{{- printf "%s:%s" $name ($image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "outrider.serviceAccount" -}}
{{- $account := (get .root.Values .tier).serviceAccount -}}
{{- if $account.name -}}
{{- $account.name -}}
{{- else if $account.create -}}
{{- include "outrider.name" . -}}
{{- else -}}
default
{{- end -}}
{{- end -}}

{{/* A value as a setting's text. YAML's numbers come as floats, which would print as 1e+06. */}}
{{- define "outrider.text" -}}
{{- if kindIs "float64" . -}}
{{- if eq . (floor .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- else if kindIs "slice" . -}}
{{- join "," . -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end -}}
