{{/* The stores, redis (sessions) and kvStore (KV blocks): a dict of `root` and `tier`, and of `client`,
the tier that goes there, where it matters: to the blocks orchestrators have other rights than workers. */}}

{{/* "true" where the chart runs this store itself. */}}
{{- define "outrider.ownStore" -}}
{{- $own := get .root.Values .tier -}}
{{- if and $own.enabled (or (eq .tier "redis") (not $own.external.url)) }}true{{ end -}}
{{- end -}}

{{/* "true" where it is orchestrators who go to the blocks. */}}
{{- define "outrider.readsBlocks" -}}
{{- if and (eq .tier "kvStore") (eq (toString .client) "orchestrator") }}true{{ end -}}
{{- end -}}

{{/* The URL of a store, with its user and without a password. */}}
{{- define "outrider.storeUrl" -}}
{{- $own := get .root.Values .tier -}}
{{- if include "outrider.ownStore" . -}}
{{- $host := include "outrider.host" (dict "root" .root "service" (include "outrider.name" .)) -}}
{{- $user := ternary "orchestrator" "outrider" (eq (include "outrider.readsBlocks" .) "true") -}}
{{- printf "%s://%s@%s:6379/0" (ternary "rediss" "redis" (eq (include "outrider.tls" .root) "true")) $user $host -}}
{{- else if and (include "outrider.readsBlocks" .) $own.external.orchestratorUrl -}}
{{- $own.external.orchestratorUrl -}}
{{- else -}}
{{- required (printf "%s.external.url is needed where the chart has no store of its own" .tier) $own.external.url -}}
{{- end -}}
{{- end -}}

{{/* Name of the secret with a store's password; empty where there is none. */}}
{{- define "outrider.storePasswordSecret" -}}
{{- $own := get .root.Values .tier -}}
{{- if include "outrider.ownStore" . -}}
{{- $own.existingSecret | default (include "outrider.name" .) -}}
{{- else -}}
{{- $own.external.passwordSecret -}}
{{- end -}}
{{- end -}}

{{/* The key of that secret which holds it. */}}
{{- define "outrider.storePasswordKey" -}}
{{- $external := (get .root.Values .tier).external -}}
{{- $reads := include "outrider.readsBlocks" . -}}
{{- if include "outrider.ownStore" . -}}
{{- ternary "orchestratorPassword" "password" (eq $reads "true") -}}
{{- else if and $reads $external.orchestratorUrl -}}
{{- $external.orchestratorPasswordKey -}}
{{- else -}}
{{- $external.passwordKey -}}
{{- end -}}
{{- end -}}

{{/* Where the sentinels' own password is in the secret; empty where there is none. */}}
{{- define "outrider.sentinelPasswordKey" -}}
{{- $external := (get .root.Values .tier).external -}}
{{- if and (not (include "outrider.ownStore" .)) $external.sentinelPasswordKey -}}
{{- if not (and $external.passwordSecret (contains "+sentinel:" $external.url)) -}}
{{- fail (printf "%s.external.sentinelPasswordKey needs passwordSecret, and a URL of sentinels" .tier) -}}
{{- end -}}
{{- $external.sentinelPasswordKey -}}
{{- end -}}
{{- end -}}

{{/* The ports of a store elsewhere, as JSON: those in its URL, and `ports`. */}}
{{- define "outrider.storePorts" -}}
{{- $external := (get .root.Values .tier).external -}}
{{- $url := include "outrider.storeUrl" . -}}
{{- $sentinels := contains "+sentinel:" $url -}}
{{- $ports := list -}}
{{- range $host := regexReplaceAll "^[a-z+]+://([^@/]*@)?([^/?]*).*$" $url "${2}" | splitList "," -}}
{{- $port := regexFind ":[0-9]+$" $host | trimPrefix ":" -}}
{{- $ports = append $ports (int ($port | default (ternary "26379" "6379" $sentinels))) -}}
{{- end -}}
{{- range $port := $external.ports | default (ternary (list 6379) list $sentinels) -}}
{{- $ports = append $ports (int $port) -}}
{{- end -}}
{{- uniq $ports | toJson -}}
{{- end -}}

{{/* How a client gets into a store, as JSON, by the names that settings have behind their prefix:
`folder` is where its secrets are mounted below /etc/outrider. */}}
{{- define "outrider.storeAccess" -}}
{{- $own := get .root.Values .tier -}}
{{- $isOwn := eq (include "outrider.ownStore" .) "true" -}}
{{- $access := dict "url" (include "outrider.storeUrl" .) -}}
{{- if include "outrider.storePasswordSecret" . -}}
{{- $_ := set $access "password_file" (printf "/etc/outrider/%s/password" .folder) -}}
{{- end -}}
{{- if include "outrider.sentinelPasswordKey" . -}}
{{- $_ := set $access "sentinel_password_file" (printf "/etc/outrider/%s/sentinel-password" .folder) -}}
{{- end -}}
{{- if hasPrefix "rediss" $access.url -}}
{{- $tls := ternary "/etc/outrider/tls" (printf "/etc/outrider/%s-tls" .folder) $isOwn -}}
{{- if or $isOwn $own.external.tlsSecret -}}
{{- $_ := set $access "ca" (printf "%s/ca.crt" $tls) -}}
{{- end -}}
{{- if or $isOwn $own.external.clientCertificate -}}
{{- $_ := set $access "cert" (printf "%s/tls.crt" $tls) -}}
{{- $_ := set $access "key" (printf "%s/tls.key" $tls) -}}
{{- end -}}
{{- end -}}
{{- toJson $access -}}
{{- end -}}

{{/* The secrets that such a client mounts, by folder. */}}
{{- define "outrider.storeVolumes" -}}
{{- $own := get .root.Values .tier -}}
{{- with include "outrider.storePasswordSecret" . }}
{{ $.folder }}:
  secretName: {{ . }}
  items:
    - key: {{ include "outrider.storePasswordKey" $ }}
      path: password
    {{- with include "outrider.sentinelPasswordKey" $ }}
    - key: {{ . }}
      path: sentinel-password
    {{- end }}
{{- end }}
{{- if and (not (include "outrider.ownStore" .)) $own.external.tlsSecret }}
{{ .folder }}-tls:
  secretName: {{ $own.external.tlsSecret }}
{{- end }}
{{- end -}}

{{/* "true" where a tier uses the store of KV blocks; orchestrators ask its index, and remove what is
a caller's. */}}
{{- define "outrider.usesKvStore" -}}
{{- $own := .root.Values.kvStore -}}
{{- if and $own.enabled (has .tier (append $own.tiers "orchestrator")) }}true{{ end -}}
{{- end -}}

{{/* The files of a store's ConfigMap. */}}
{{- define "outrider.storeFiles" -}}
{{- $own := get .root.Values .tier -}}
redis.conf: |
  dir /data
  unixsocket /run/outrider/redis.sock
  unixsocketperm 700
  {{- if include "outrider.tls" .root }}
  port 0
  tls-port 6379
  tls-ca-cert-file /etc/outrider/tls/ca.crt
  tls-cert-file /etc/outrider/tls/tls.crt
  tls-key-file /etc/outrider/tls/tls.key
  tls-auth-clients yes
  {{- else }}
  port 6379
  {{- end }}
  maxmemory {{ $own.maxMemory }}
  save ""
  {{- if eq .tier "redis" }}
  # Sessions end by their time to live. None is dropped for another one.
  maxmemory-policy noeviction
  appendonly {{ ternary "yes" "no" $own.persistence.enabled }}
  appendfsync {{ $own.persistence.appendFsync }}
  {{- else }}
  # A cache: what is used least goes.
  maxmemory-policy {{ $own.evictionPolicy }}
  appendonly no
  {{- end }}
start.sh: |
  {{- .root.Files.Get "files/redis-start.sh" | nindent 2 }}
alive.sh: |
  {{- .root.Files.Get "files/redis-alive.sh" | nindent 2 }}
rights: {{ .root.Files.Get (printf "files/%s-rights" (lower .tier)) | trim | quote }}
{{- if eq .tier "kvStore" }}
orchestrator-rights: {{ .root.Files.Get "files/kvstore-orchestrator-rights" | trim | quote }}
{{- end }}
users: |
  {{- range $own.users }}
  {{ .name }} {{ join " " .rights }}
  {{- end }}
{{- end -}}
