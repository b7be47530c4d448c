{{/* The files of the store's ConfigMap. */}}
{{- define "outrider.redisFiles" -}}
redis.conf: |
  dir /data
  unixsocket /run/outrider/redis.sock
  unixsocketperm 700
  {{- if eq .Values.tls.mode "none" }}
  port 6379
  {{- else }}
  port 0
  tls-port 6379
  tls-ca-cert-file /etc/outrider/tls/ca.crt
  tls-cert-file /etc/outrider/tls/tls.crt
  tls-key-file /etc/outrider/tls/tls.key
  tls-auth-clients yes
  {{- end }}
  maxmemory {{ .Values.redis.maxMemory }}
  # Sessions end by their time to live. None is dropped for another one.
  maxmemory-policy noeviction
  save ""
  appendonly {{ ternary "yes" "no" .Values.redis.persistence.enabled }}
  appendfsync {{ .Values.redis.persistence.appendFsync }}
start.sh: |
  {{- .Files.Get "files/redis-start.sh" | nindent 2 }}
alive.sh: |
  {{- .Files.Get "files/redis-alive.sh" | nindent 2 }}
rights: {{ .Files.Get "files/redis-rights" | trim | quote }}
{{- end -}}
