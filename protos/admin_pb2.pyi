from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pool(_message.Message):
    __slots__ = ("ready", "target", "starting", "stopping", "queue", "running", "kv_used", "notes")
    READY_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    KV_USED_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    ready: int
    target: int
    starting: int
    stopping: int
    queue: int
    running: int
    kv_used: float
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ready: _Optional[int] = ..., target: _Optional[int] = ..., starting: _Optional[int] = ..., stopping: _Optional[int] = ..., queue: _Optional[int] = ..., running: _Optional[int] = ..., kv_used: _Optional[float] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("id", "home", "role", "state", "gpu", "jobs")
    ID_FIELD_NUMBER: _ClassVar[int]
    HOME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    id: str
    home: str
    role: str
    state: str
    gpu: str
    jobs: int
    def __init__(self, id: _Optional[str] = ..., home: _Optional[str] = ..., role: _Optional[str] = ..., state: _Optional[str] = ..., gpu: _Optional[str] = ..., jobs: _Optional[int] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("state", "missing", "model", "pools", "replicas", "cluster")
    class PoolsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Pool
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Pool, _Mapping]] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    state: str
    missing: _containers.RepeatedScalarFieldContainer[str]
    model: str
    pools: _containers.MessageMap[str, Pool]
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    cluster: _struct_pb2.Struct
    def __init__(self, state: _Optional[str] = ..., missing: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ..., pools: _Optional[_Mapping[str, Pool]] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ..., cluster: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("prefill", "decode", "dry_run", "model")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    dry_run: bool
    model: str
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., dry_run: _Optional[bool] = ..., model: _Optional[str] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("pool", "before", "after")
    POOL_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    pool: str
    before: int
    after: int
    def __init__(self, pool: _Optional[str] = ..., before: _Optional[int] = ..., after: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("changes", "says", "undo", "dry_run")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    SAYS_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    says: str
    undo: str
    dry_run: bool
    def __init__(self, changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ..., says: _Optional[str] = ..., undo: _Optional[str] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("replica", "hand_over", "force", "dry_run")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    replica: str
    hand_over: bool
    force: bool
    dry_run: bool
    def __init__(self, replica: _Optional[str] = ..., hand_over: _Optional[bool] = ..., force: _Optional[bool] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ("replica", "dry_run")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    replica: str
    dry_run: bool
    def __init__(self, replica: _Optional[str] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class FlipRequest(_message.Message):
    __slots__ = ("replica", "to", "dry_run")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    replica: str
    to: str
    dry_run: bool
    def __init__(self, replica: _Optional[str] = ..., to: _Optional[str] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class SteerResponse(_message.Message):
    __slots__ = ("replicas", "before", "dry_run")
    class BeforeEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedScalarFieldContainer[str]
    before: _containers.ScalarMap[str, str]
    dry_run: bool
    def __init__(self, replicas: _Optional[_Iterable[str]] = ..., before: _Optional[_Mapping[str, str]] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("request_id", "decisions")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    decisions: _containers.RepeatedCompositeFieldContainer[_struct_pb2.Struct]
    def __init__(self, request_id: _Optional[str] = ..., decisions: _Optional[_Iterable[_Union[_struct_pb2.Struct, _Mapping]]] = ...) -> None: ...
