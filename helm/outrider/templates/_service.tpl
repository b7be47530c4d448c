{{/* The headless Service of a tier of workers, by which orchestrators find them. */}}
{{- define "outrider.workersService" -}}
{{- $group := and (eq .tier "target") (eq .root.Values.target.kind "LeaderWorkerSet") -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "outrider.metadata" (merge (dict "name" (include "outrider.workers" .)) .) | nindent 2 }}
spec:
  clusterIP: None
  selector:
    {{- include "outrider.selector" . | nindent 4 }}
    {{- if $group }}
    # The first pod of a group speaks for it.
    leaderworkerset.sigs.k8s.io/worker-index: "0"
    {{- end }}
  ports:
    - name: grpc
      port: {{ get .root.Values.ports .tier }}
      targetPort: grpc
    {{- if .root.Values.metrics.enabled }}
    - name: metrics
      port: {{ .root.Values.metrics.port }}
      targetPort: metrics
    {{- end }}
{{- end -}}
