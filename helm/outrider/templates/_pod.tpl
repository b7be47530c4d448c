{{/* The pod of a tier: a dict of `root`, `tier` and, for the pods of a group that follow its first
one, `follower`. */}}

{{- define "outrider.podTemplate" -}}
{{- $values := .root.Values -}}
{{- $own := get $values .tier -}}
metadata:
  labels:
    {{- include "outrider.podLabels" . | nindent 4 }}
    {{- with $own.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: {{ .tier }}
    # A pod takes note of its settings at start only.
    checksum/settings: {{ include "outrider.settings" . | sha256sum }}
    {{- with merge (dict) $own.podAnnotations $values.commonAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "outrider.serviceAccount" . }}
  automountServiceAccountToken: {{ and (eq .tier "orchestrator") (eq $values.discovery "kubernetes") }}
  # Variables such as OUTRIDER_TARGETS_PORT would be taken for settings.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add $own.preStopSeconds $own.drainSeconds 15 }}
  securityContext:
    {{- toYaml $values.podSecurityContext | nindent 4 }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .tier }}
      {{- include "outrider.container" . | nindent 6 }}
  volumes:
    {{- include "outrider.volumes" . | nindent 4 }}
  {{- include "outrider.scheduling" . | nindent 2 }}
{{- end -}}

{{- define "outrider.container" -}}
{{- $values := .root.Values -}}
{{- $own := get $values .tier -}}
image: {{ include "outrider.image" . }}
imagePullPolicy: {{ $values.image.pullPolicy }}
envFrom:
  - configMapRef:
      name: {{ include "outrider.name" . }}
{{- $env := include "outrider.env" . }}
{{- if $env }}
env:
  {{- $env | nindent 2 }}
{{- end }}
{{- if not .follower }}
ports:
  - name: grpc
    containerPort: {{ get $values.ports .tier }}
  - name: health
    containerPort: {{ $values.ports.health }}
  {{- if $values.metrics.enabled }}
  - name: metrics
    containerPort: {{ $values.metrics.port }}
  {{- end }}
{{ include "outrider.probes" . }}
{{- end }}
lifecycle:
  preStop:
    sleep:
      # Who follows another rank stays until that one has drained, and ends with it.
      seconds: {{ if .follower }}{{ add $own.preStopSeconds $own.drainSeconds }}{{ else }}{{ $own.preStopSeconds }}{{ end }}
resources:
  {{- include "outrider.resources" . | nindent 2 }}
securityContext:
  {{- toYaml $values.containerSecurityContext | nindent 2 }}
volumeMounts:
  {{- include "outrider.mounts" . | nindent 2 }}
{{- end -}}

{{/* The kubelet's own gRPC probes speak no TLS, so health has a port where it is alone. A pod that
drains says NOT_SERVING; nobody kills it for that, since probes of liveness end with termination. */}}
{{- define "outrider.probes" -}}
{{- $port := .root.Values.ports.health -}}
{{- $seconds := (get .root.Values .tier).startupSeconds -}}
startupProbe:
  grpc:
    port: {{ $port }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add $seconds 34) 5 }}
readinessProbe:
  grpc:
    port: {{ $port }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  grpc:
    port: {{ $port }}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
{{- end -}}

{{- define "outrider.env" -}}
{{- $own := get .root.Values .tier -}}
{{- with .root.Values.telemetry.otlp -}}
{{- if .endpoint }}
# What tells one pod's traces and metrics from another's.
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name={{ $.root.Release.Namespace }},k8s.pod.name=$(POD_NAME),outrider.release={{ $.root.Release.Name }}
{{- with .headersSecret }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: headers
{{- end }}
{{- if .caSecret }}
- name: OTEL_EXPORTER_OTLP_CERTIFICATE
  value: /etc/outrider/otlp/ca.crt
{{- end }}
{{- end }}
{{- end }}
{{- with $own.model -}}
{{- with .hubTokenSecret }}
- name: HF_TOKEN_PATH
  value: /etc/outrider/hub/token
{{- end }}
{{- end }}
{{- if and (eq .tier "orchestrator") (eq .root.Values.discovery "kubernetes") }}
# Kubernetes copies it from the node, as of 1.35; before it is empty.
- name: OUTRIDER_ORCHESTRATOR_ZONE
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['topology.kubernetes.io/zone']
{{- end }}
{{- with $own.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "outrider.resources" -}}
{{- $own := get .root.Values .tier -}}
{{- $resources := deepCopy $own.resources -}}
{{- with $own.gpu -}}
{{- if gt (int .count) 0 -}}
{{- $limits := get $resources "limits" | default dict -}}
{{- $_ := set $limits .resource .count -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "outrider.mounts" -}}
{{- $values := .root.Values -}}
{{- $own := get $values .tier -}}
- name: tmp
  mountPath: /tmp
{{- if ne .tier "orchestrator" }}
- name: cache
  mountPath: /cache
- name: shm
  mountPath: /dev/shm
{{- if $own.model.volume }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- if $own.model.hubTokenSecret }}
- name: hub
  mountPath: /etc/outrider/hub
  readOnly: true
{{- end }}
{{- end }}
{{- range $name := include "outrider.secretVolumes" . | fromYaml | keys | sortAlpha }}
- name: {{ $name }}
  mountPath: /etc/outrider/{{ $name }}
  readOnly: true
{{- end }}
{{- with $own.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "outrider.volumes" -}}
{{- $values := .root.Values -}}
{{- $own := get $values .tier -}}
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
{{- if ne .tier "orchestrator" }}
{{- if and (eq .tier "target") (eq $values.target.kind "StatefulSet") $values.target.cache.claim }}
{{- else if $own.cache.volume }}
- name: cache
  {{- toYaml $own.cache.volume | nindent 2 }}
{{- else }}
- name: cache
  emptyDir:
    sizeLimit: {{ $own.cache.size }}
{{- end }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ $own.shmSize }}
{{- with $own.model.volume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.model.hubTokenSecret }}
- name: hub
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items:
      - key: token
        path: token
{{- end }}
{{- end }}
{{- range $name, $secret := include "outrider.secretVolumes" . | fromYaml }}
- name: {{ $name }}
  secret:
    {{- toYaml $secret | nindent 4 }}
    defaultMode: 0440
{{- end }}
{{- with $own.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The secrets that a tier reads, by the folder below /etc/outrider that they are mounted at. Whole
folders: what is mounted by subPath is not renewed. */}}
{{- define "outrider.secretVolumes" -}}
{{- $values := .root.Values -}}
{{- if include "outrider.tls" .root }}
tls:
  secretName: {{ include "outrider.tlsSecret" . }}
{{- end }}
{{- if $values.auth.workers.enabled }}
workers:
  secretName: {{ $values.auth.workers.existingSecret | default (include "outrider.name" (dict "root" .root "tier" "workers")) }}
  items:
    - key: token
      path: token
    {{- if and (ne .tier "orchestrator") (ne $values.auth.workers.acceptedKey "token") }}
    - key: {{ $values.auth.workers.acceptedKey }}
      path: {{ $values.auth.workers.acceptedKey }}
    {{- end }}
{{- end }}
{{- if eq .tier "orchestrator" }}
{{- if and (include "outrider.tls" .root) $values.tls.publicSecret }}
public-tls:
  secretName: {{ $values.tls.publicSecret }}
{{- end }}
{{- if $values.auth.callers.enabled }}
callers:
  secretName: {{ include "outrider.callersSecret" .root }}
  items:
    - key: tokens
      path: tokens
{{- end }}
{{- with $values.auth.jwt }}
{{- if and .issuer .keysSecret }}
jwt:
  secretName: {{ .keysSecret }}
  items:
    - key: {{ .keysKey }}
      path: {{ .keysKey }}
{{- end }}
{{- if and .issuer .caSecret }}
jwt-ca:
  secretName: {{ .caSecret }}
  items:
    - key: ca.crt
      path: ca.crt
{{- end }}
{{- end }}
{{- include "outrider.storeVolumes" (dict "root" .root "tier" "redis" "folder" "store") }}
{{- end }}
{{- if include "outrider.usesKvStore" . }}
{{- include "outrider.storeVolumes" (dict "root" .root "tier" "kvStore" "client" .tier "folder" "kv-store") }}
{{- end }}
{{- if and $values.telemetry.otlp.endpoint $values.telemetry.otlp.caSecret }}
otlp:
  secretName: {{ $values.telemetry.otlp.caSecret }}
  items:
    - key: ca.crt
      path: ca.crt
{{- end }}
{{- end -}}

{{- define "outrider.callersSecret" -}}
{{- .Values.auth.callers.existingSecret | default (include "outrider.name" (dict "root" . "tier" "callers")) -}}
{{- end -}}

{{/* Name of the secret with the token that `helm test` calls with; empty where it needs none. */}}
{{- define "outrider.testTokenSecret" -}}
{{- if .Values.test.tokenSecret -}}
{{- .Values.test.tokenSecret -}}
{{- else if .Values.auth.callers.enabled -}}
{{- include "outrider.callersSecret" . -}}
{{- end -}}
{{- end -}}

{{/* "true" where there is a test: one that has what lets it in. */}}
{{- define "outrider.hasTest" -}}
{{- if or (include "outrider.testTokenSecret" .) (not .Values.auth.jwt.issuer) }}true{{ end -}}
{{- end -}}

{{- define "outrider.scheduling" -}}
{{- $own := get .root.Values .tier -}}
{{- with $own.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $own.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range $constraint := $own.topologySpreadConstraints }}
  {{- $labels := include "outrider.selector" $ | fromYaml }}
  - {{- toYaml (merge (dict) $constraint (dict "labelSelector" (dict "matchLabels" $labels))) | nindent 4 }}
  {{- end }}
{{- end }}
{{- with $own.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}
