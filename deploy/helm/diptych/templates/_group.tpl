{{/* Affinity of a group's pods: the values', and with `ownNode` the term that keeps Diptych's other pods away. Arguments:
     root, group. */}}
{{- define "diptych.affinity" -}}
{{- $affinity := .group.affinity | default dict | deepCopy -}}
{{- if .group.ownNode -}}
{{- $others := dict "matchLabels" (include "diptych.selector" .root | fromYaml) "matchExpressions" (list (dict "key" "app.kubernetes.io/component" "operator" "NotIn" "values" (list "head"))) -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" $others -}}
{{- $apart := get $affinity "podAntiAffinity" | default dict -}}
{{- $required := "requiredDuringSchedulingIgnoredDuringExecution" -}}
{{- $_ := set $apart $required (append (get $apart $required | default list) $term) -}}
{{- $_ := set $affinity "podAntiAffinity" $apart -}}
{{- end -}}
{{- $affinity | toYaml -}}
{{- end }}

{{/* One worker group. Arguments: root, group. */}}
{{- define "diptych.group" -}}
{{- $root := .root -}}
{{- $group := .group -}}
{{- $slots := $group.slots | default dict -}}
{{- $keys := and $slots.gateway $root.Values.gateway.keysSecret -}}
{{- $homes := dict -}}
{{- range $pool := list "prefill" "decode" "gateway" -}}
{{- with get $slots $pool }}{{ $_ := set $homes $pool (toString .) }}{{ end -}}
{{- end -}}
{{- if $slots.gateway }}{{ $_ := set $homes "router" "1" }}{{ end -}}
- groupName: {{ $group.name }}
  replicas: {{ $group.pods }}
  minReplicas: {{ $group.pods }}
  maxReplicas: {{ $group.pods }}
  # The operator writes it back like this: without it, the groups would be its own and no longer Helm's.
  scaleStrategy: {}
  resources: {{ $homes | toJson }}
  rayStartParams:
    object-store-memory: "104857600"
  template:
    metadata:
      labels:
        {{- include "diptych.selector" $root | nindent 8 }}
        app.kubernetes.io/component: {{ $group.name }}
        {{- if and $slots.gateway (eq $root.Values.gateway.listen "gateway") }}
        diptych.io/gateway: "true"
        {{- end }}
    spec:
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: {{ $root.Values.drain.graceSeconds }}
      {{- with $root.Values.image.pullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $group.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $group.tolerations }}
      tolerations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with include "diptych.affinity" (dict "root" $root "group" $group) | fromYaml }}
      affinity:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- include "diptych.podSecurity" $root | nindent 8 }}
      containers:
      - name: ray-worker
        image: {{ include "diptych.image" $root }}
        imagePullPolicy: {{ $root.Values.image.pullPolicy }}
        ports:
        - {name: serve, containerPort: 8000}
        - {name: serve-grpc, containerPort: 9000}
        {{- include "diptych.metricsPorts" (include "diptych.groupProcesses" $slots | int) | trim | nindent 8 }}
        env:
          {{- include "diptych.env" (dict "root" $root "group" $group) | trim | nindent 10 }}
        resources:
          {{- toYaml $group.resources | nindent 10 }}
        securityContext:
          {{- include "diptych.containerSecurity" $group.capabilities | nindent 10 }}
        # KubeRay's own probe takes a pod out of its Service after a single answer that takes two seconds.
        {{- $proxied := eq $root.Values.gateway.listen "serve" }}
        {{- $wget := printf "wget -q -T %d -O -" (ternary 4 2 $proxied) }}
        readinessProbe:
          exec:
            command:
            - bash
            - -c
            - {{ $wget }} http://localhost:52365/api/local_raylet_healthz | grep -q success
              {{- if $proxied }} && {{ $wget }} http://localhost:8000/-/healthz | grep -q success
              {{- else if $slots.gateway }} && {{ $wget }} http://localhost:8000/ready > /dev/null{{ end }}
          initialDelaySeconds: 5
          periodSeconds: {{ ternary 5 2 $proxied }}
          timeoutSeconds: {{ ternary 9 5 $proxied }}
          failureThreshold: 2
        lifecycle:
          preStop:
            exec:
              command: [diptych-drain, {{ $root.Values.drain.seconds | quote }}]
        {{- if or $group.shm $group.hugepages $root.Values.model.volume $keys }}
        volumeMounts:
        {{- if $group.shm }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if $group.hugepages }}
        - {name: hugepages, mountPath: /dev/hugepages}
        {{- end }}
        {{- if $root.Values.model.volume }}
        - {name: model, mountPath: {{ $root.Values.model.mountPath }}, readOnly: true}
        {{- end }}
        {{- if $keys }}
        - {name: keys, mountPath: /etc/diptych/keys, readOnly: true}
        {{- end }}
      volumes:
      {{- with $group.shm }}
      - name: shm
        emptyDir: {medium: Memory, sizeLimit: {{ . }}}
      {{- end }}
      {{- if $group.hugepages }}
      - name: hugepages
        emptyDir: {medium: HugePages-2Mi}
      {{- end }}
      {{- with $root.Values.model.volume }}
      - name: model
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $keys }}
      - name: keys
        secret:
          secretName: {{ . }}
          items: [{key: keys.yaml, path: keys.yaml}]
      {{- end }}
        {{- end }}
{{- end }}
