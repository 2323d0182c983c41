{{- define "diptych.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "diptych.selector" -}}
app.kubernetes.io/part-of: diptych
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "diptych.labels" -}}
{{ include "diptych.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Replicas that a pool's slots can hold, over all groups. Arguments: root, pool. */}}
{{- define "diptych.room" -}}
{{- $room := 0 -}}
{{- range .root.Values.groups -}}
{{- $room = add $room (mul .pods (get (.slots | default dict) $.pool | default 0)) -}}
{{- end -}}
{{- $room -}}
{{- end }}

{{/* Replicas of each pool, as JSON: what `diptych scale` has ordered in this release, for as long as the values have the
     count that it was ordered instead of; else the values'. Without a cluster (`helm template`) only these. */}}
{{- define "diptych.counts" -}}
{{- $release := lookup "ray.io/v1" "RayService" .Release.Namespace .Release.Name | default dict -}}
{{- $scaled := dig "metadata" "annotations" "diptych.io/scaled-replicas" "{}" $release | fromJson -}}
{{- $counts := dict -}}
{{- range $pool, $size := .Values.pools -}}
{{- $count := $size.replicas | int -}}
{{- $order := get $scaled $pool | default dict -}}
{{- if and $order (eq (int $order.insteadOf) $count) -}}
{{- $count = int $order.replicas -}}
{{- end -}}
{{- $_ := set $counts $pool $count -}}
{{- end -}}
{{- $counts | toJson -}}
{{- end }}

{{/* Pools of no replica: Serve knows no deployment of none, so the builder must not make one. */}}
{{- define "diptych.emptyPools" -}}
pools:
{{- range $pool, $size := .Values.pools }}
{{- if not $size.replicas }}
  {{ $pool }}: {replicas: 0}
{{- end }}
{{- end }}
{{- end }}

{{/* One deployment of a pool in the Serve config: its replicas, and the slot each one takes. Serve takes these
     ray_actor_options instead of the builder's (cluster/app.py), so the environment of vLLM's workers stands here, too. */}}
{{- define "diptych.pool" -}}
{{- $pool := get .root.Values.pools .pool -}}
{{- if $pool.replicas }}
{{- $ranks := dig "pools" .pool "tensor_parallel" 1 .root.Values.config | int -}}
- name: {{ .name }}
  num_replicas: {{ get (include "diptych.counts" .root | fromJson) .pool }}
  ray_actor_options:
    num_cpus: 0.01
    {{- with $pool.gpus }}
    num_gpus: {{ . }}
    {{- end }}
    resources: {{ dict .pool 1 | toJson }}
    {{- if eq (dig "engine" "kind" "diptych" .root.Values.config) "vllm" }}
    {{- $threads := dig "pools" .pool "engine" "threads" 1 .root.Values.config | int | toString }}
    {{- $environment := dict "env_vars" (dict "OMP_NUM_THREADS" $threads) }}
    {{- with dig "engine" "python" "" .root.Values.config }}
    {{- $_ := set $environment "py_executable" . }}
    {{- end }}
    runtime_env: {{ $environment | toJson }}
    {{- end }}
  {{- if gt $ranks 1 }}
  placement_group_strategy: STRICT_PACK
  placement_group_bundles:
  {{- range $rank := until $ranks }}
  - CPU: 0.01
    {{- if eq $rank 0 }}
    {{ $.pool }}: 1
    {{- with $pool.gpus }}
    GPU: {{ . }}
    {{- end }}
    {{- end }}
  {{- end }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Where processes export their metrics: the first of the ports of a pod. */}}
{{- define "diptych.metricsPort" -}}9400{{- end }}

{{/* Processes of one pod of a group that may export metrics. Argument: its slots. A pod with a gateway's slot may
     have the router too. */}}
{{- define "diptych.groupProcesses" -}}
{{- $count := 0 -}}
{{- range $pool := list "prefill" "decode" "gateway" -}}
{{- $count = add $count (get $ $pool | default 0) -}}
{{- end -}}
{{- if .gateway }}{{ $count = add $count 1 }}{{ end -}}
{{- $count -}}
{{- end }}

{{/* The most of any pod; the head has Control. */}}
{{- define "diptych.processes" -}}
{{- $most := 1 -}}
{{- range .Values.groups -}}
{{- $most = max $most (include "diptych.groupProcesses" (.slots | default dict) | int) -}}
{{- end -}}
{{- $most -}}
{{- end }}

{{/* Container ports for metrics. Argument: how many. */}}
{{- define "diptych.metricsPorts" -}}
{{- range $index := until . }}
- {name: metrics-{{ $index }}, containerPort: {{ add (include "diptych.metricsPort" nil | int) $index }}}
{{- end }}
{{- end }}

{{/* Where operators talk to the cluster: on the head's pod, with a key. */}}
{{- define "diptych.control" -}}
host: 0.0.0.0
port: 8001
grpc_port: 9001
key_file: /etc/diptych/admin
{{- end }}

{{/* What Kubernetes decides of the gateways: whether Serve's proxies listen or they themselves, under the
     Services' names and those of config.gateway.hosts; keys come from a Secret. */}}
{{- define "diptych.gateway" -}}
{{- $own := list -}}
{{- range $suffix := ternary (list "serve-svc" "gateway") (list "serve-svc") (eq .Values.gateway.listen "gateway") -}}
{{- $service := printf "%s-%s" $.Release.Name $suffix -}}
{{- $inNamespace := printf "%s.%s" $service $.Release.Namespace -}}
{{- $own = concat $own (list $service $inNamespace (printf "%s.svc" $inNamespace) (printf "%s.svc.cluster.local" $inNamespace)) -}}
{{- end -}}
listen: {{ .Values.gateway.listen }}
{{- if eq .Values.gateway.listen "gateway" }}
host: 0.0.0.0
http_port: 8000
grpc_port: 9000
{{- end }}
hosts: {{ concat $own (dig "gateway" "hosts" list .Values.config) | toJson }}
{{- if .Values.gateway.keysSecret }}
api_keys_file: /etc/diptych/keys/keys.yaml
{{- end }}
{{- end }}

{{- define "diptych.serveConfig" -}}
proxy_location: {{ ternary "Disabled" "EveryNode" (eq .Values.gateway.listen "gateway") }}
http_options:
  host: 0.0.0.0
  port: 8000
grpc_options:
  port: 9000
  grpc_servicer_functions:
  - diptych.protos.inference_pb2_grpc.add_InferenceServicer_to_server
  - grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server
{{- $config := merge (dict "ray" .Values.ray "control" (include "diptych.control" . | fromYaml) "gateway" (include "diptych.gateway" . | fromYaml) "observability" (dict "metrics_port" (include "diptych.metricsPort" . | int))) (include "diptych.emptyPools" . | fromYaml) .Values.config }}
applications:
- name: diptych
  import_path: diptych.cluster.app:front_application
  route_prefix: /
  args: {{ omit $config "model" "engine" "pools" "kv_transfer" "kv_tiers" "slo" | toJson }}
  deployments:
  - name: Gateway
    num_replicas: {{ .Values.gateway.replicas }}
    ray_actor_options:
      num_cpus: 0.01
      resources: {"gateway": 1}
- name: diptych-model
  import_path: diptych.cluster.app:model_application
  route_prefix: null
  args: {{ omit $config "gateway" "control" "scaling" | toJson }}
  deployments:
  - name: Router
    ray_actor_options:
      num_cpus: 0.01
      resources: {"router": 1}
  {{- include "diptych.pool" (dict "root" . "pool" "prefill" "name" "PrefillWorker") | nindent 2 }}
  {{- include "diptych.pool" (dict "root" . "pool" "decode" "name" "DecodeWorker") | nindent 2 }}
{{- end }}

{{/* Environment of every Ray container. A group's own variables replace those of the same name, but for the words that
     processes prove themselves with. Arguments: root, group (may be nil). */}}
{{- define "diptych.env" -}}
{{- $own := dict -}}
{{- with .group }}{{ $own = .env | default dict }}{{ end -}}
{{- range $name := list "DIPTYCH_SECRET" "RAY_AUTH_MODE" "RAY_AUTH_TOKEN" "RAY_AUTH_TOKEN_PATH" -}}
{{- if hasKey $own $name -}}
{{- fail (printf "groups[].env may not have %s: the Secret named by secretName has it, and ray.auth the mode" $name) -}}
{{- end -}}
{{- end -}}
{{- $environment := .root.Files.Get "files/environment.yaml" | fromYaml -}}
{{- if dig "redisAddress" "" (.root.Values.head.faultTolerance | default dict) -}}
{{- $environment = merge $environment (.root.Files.Get "files/lost_head.yaml" | fromYaml) -}}
{{- end -}}
{{- range $name, $value := $environment }}
{{- if not (hasKey $own $name) }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}
# Every process of a pod writes its log to the container's output, where `kubectl logs` finds it.
{{- if not (hasKey $own "RAY_LOG_TO_STDERR") }}
- name: RAY_LOG_TO_STDERR
  value: "1"
{{- end }}
{{- if not (hasKey $own "RAY_BACKEND_LOG_LEVEL") }}
- name: RAY_BACKEND_LOG_LEVEL
  value: warning
{{- end }}
- name: DIPTYCH_SECRET
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.secretName }}
      key: secret
{{- range $name, $value := $own }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{- define "diptych.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
  {{- with . }}
  add: {{ toJson . }}
  {{- end }}
{{- end }}

{{- define "diptych.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
seccompProfile:
  type: RuntimeDefault
{{- end }}
