//! The few names that a pickle of tensors may mention, and what each stands for here.
//!
//! Nothing is looked up, imported or called: a name that is not in this table is an error, and one that is becomes one of
//! these values.

use crate::gradients::tensor::{Dtype, SkippedBecause};

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Global {
    /// `OrderedDict` and its kin.
    Dict,
    /// Called with one container, it is that container: `set`, `torch.Size`.
    Same,
    /// `_rebuild_tensor`, `_v2`: storage, offset, size, stride, …
    Tensor,
    /// `_rebuild_tensor_v3`: as before, and the element type as the seventh.
    TensorOfType,
    /// `_rebuild_parameter`: a tensor, …
    Parameter,
    /// `_rebuild_from_type_v2`: another of these, a type, its arguments, …
    FromType,
    /// A kind of tensor that is not read.
    Packed(&'static str),
    /// A storage's type.
    Storage(&'static Element),
    /// An element type.
    Dtype(&'static Element),
    /// Another library's object: noted where a tensor might stand, and never looked into.
    Foreign(&'static str),
    /// `getattr`, which names a method of a foreign class and is refused on anything else.
    GetAttr,
    /// Devices, versions and the like: kept as a value of no interest.
    Inert,
}

/// What a storage or a tensor is made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Element {
    pub name: &'static str,
    /// Bytes; 1 for an untyped storage.
    pub size: u64,
    pub read: Result<Dtype, SkippedBecause>,
    pub untyped: bool,
}

const fn element(name: &'static str, size: u64, read: Result<Dtype, SkippedBecause>) -> Element {
    Element {
        name,
        size,
        read,
        untyped: false,
    }
}

static UNTYPED: Element = Element {
    name: "bytes",
    size: 1,
    read: Err(SkippedBecause::NotNumbers),
    untyped: true,
};

use SkippedBecause::{Complex, Integer, Packed};

/// Names of a dtype, of the storage with that element, and the element.
static ELEMENTS: [(&str, &str, Element); 28] = [
    (
        "float64",
        "DoubleStorage",
        element("torch.float64", 8, Ok(Dtype::F64)),
    ),
    (
        "float32",
        "FloatStorage",
        element("torch.float32", 4, Ok(Dtype::F32)),
    ),
    (
        "float16",
        "HalfStorage",
        element("torch.float16", 2, Ok(Dtype::F16)),
    ),
    (
        "bfloat16",
        "BFloat16Storage",
        element("torch.bfloat16", 2, Ok(Dtype::Bf16)),
    ),
    (
        "int64",
        "LongStorage",
        element("torch.int64", 8, Err(Integer)),
    ),
    (
        "int32",
        "IntStorage",
        element("torch.int32", 4, Err(Integer)),
    ),
    (
        "int16",
        "ShortStorage",
        element("torch.int16", 2, Err(Integer)),
    ),
    (
        "int8",
        "CharStorage",
        element("torch.int8", 1, Err(Integer)),
    ),
    (
        "uint8",
        "ByteStorage",
        element("torch.uint8", 1, Err(Integer)),
    ),
    (
        "bool",
        "BoolStorage",
        element("torch.bool", 1, Err(Integer)),
    ),
    (
        "complex64",
        "ComplexFloatStorage",
        element("torch.complex64", 8, Err(Complex)),
    ),
    (
        "complex128",
        "ComplexDoubleStorage",
        element("torch.complex128", 16, Err(Complex)),
    ),
    (
        "qint8",
        "QInt8Storage",
        element("torch.qint8", 1, Err(Packed)),
    ),
    (
        "quint8",
        "QUInt8Storage",
        element("torch.quint8", 1, Err(Packed)),
    ),
    (
        "qint32",
        "QInt32Storage",
        element("torch.qint32", 4, Err(Packed)),
    ),
    (
        "quint4x2",
        "QUInt4x2Storage",
        element("torch.quint4x2", 1, Err(Packed)),
    ),
    (
        "quint2x4",
        "QUInt2x4Storage",
        element("torch.quint2x4", 1, Err(Packed)),
    ),
    // These have no storage type of their own.
    (
        "float8_e4m3fn",
        "",
        element("torch.float8_e4m3fn", 1, Ok(Dtype::Fp8E4m3fn)),
    ),
    (
        "float8_e5m2",
        "",
        element("torch.float8_e5m2", 1, Ok(Dtype::Fp8E5m2)),
    ),
    (
        "float8_e4m3fnuz",
        "",
        element("torch.float8_e4m3fnuz", 1, Ok(Dtype::Fp8E4m3fnuz)),
    ),
    (
        "float8_e5m2fnuz",
        "",
        element("torch.float8_e5m2fnuz", 1, Ok(Dtype::Fp8E5m2fnuz)),
    ),
    (
        "float8_e8m0fnu",
        "",
        element("torch.float8_e8m0fnu", 1, Err(SkippedBecause::UnreadFloat)),
    ),
    (
        "float4_e2m1fn_x2",
        "",
        element(
            "torch.float4_e2m1fn_x2",
            1,
            Err(SkippedBecause::UnreadFloat),
        ),
    ),
    (
        "complex32",
        "ComplexHalfStorage",
        element("torch.complex32", 4, Err(Complex)),
    ),
    ("uint16", "", element("torch.uint16", 2, Err(Integer))),
    ("uint32", "", element("torch.uint32", 4, Err(Integer))),
    ("uint64", "", element("torch.uint64", 8, Err(Integer))),
    ("bits8", "", element("torch.bits8", 1, Err(Packed))),
];

/// What `module.name` stands for, `None` where it is not allowed.
pub(super) fn lookup(module: &str, name: &str) -> Option<Global> {
    Some(match (module, name) {
        ("collections", "OrderedDict" | "defaultdict" | "Counter")
        | ("builtins" | "__builtin__", "dict") => Global::Dict,
        ("builtins" | "__builtin__", "set" | "frozenset" | "list" | "tuple")
        | ("torch", "Size") => Global::Same,
        ("torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2") => Global::Tensor,
        ("torch._utils", "_rebuild_tensor_v3") => Global::TensorOfType,
        ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state") => {
            Global::Parameter
        }
        ("torch._tensor", "_rebuild_from_type_v2") => Global::FromType,
        ("torch._utils", packed) => Global::Packed(
            PACKED
                .iter()
                .find(|name| name.rsplit('.').next() == Some(packed))?,
        ),
        ("torch.storage" | "torch", "UntypedStorage") => Global::Storage(&UNTYPED),
        ("torch" | "torch.cuda", storage) if storage.ends_with("Storage") => {
            Global::Storage(&ELEMENTS.iter().find(|(_, name, _)| *name == storage)?.2)
        }
        (
            "torch",
            "Tensor" | "device" | "strided" | "sparse_coo" | "per_tensor_affine"
            | "per_channel_affine",
        )
        | ("torch.nn.parameter", "Parameter" | "Buffer")
        | ("torch.serialization", "_get_layout")
        | ("torch.torch_version", "TorchVersion")
        | ("_codecs", "encode")
        | (
            "builtins" | "__builtin__",
            "bytearray" | "complex" | "int" | "float" | "str" | "bool",
        ) => Global::Inert,
        ("torch", dtype) => Global::Dtype(&ELEMENTS.iter().find(|(name, _, _)| *name == dtype)?.2),
        ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct") => {
            Global::Foreign("numpy.ndarray")
        }
        ("numpy.core.multiarray" | "numpy._core.multiarray", "scalar")
        | ("numpy", "ndarray" | "dtype") => Global::Inert,
        ("numpy.dtypes", dtype) if dtype.ends_with("DType") => Global::Inert,
        // The quantized twin in a dump of TransformerEngine's DumpTensors: an object of its own, left out.
        (module, _)
            if ["transformer_engine", "transformer_engine_torch"]
                .contains(&module.split('.').next().unwrap_or_default()) =>
        {
            Global::Foreign(TRANSFORMER_ENGINE)
        }
        ("builtins" | "__builtin__", "getattr") => Global::GetAttr,
        _ => return None,
    })
}

/// What a TransformerEngine object is called in a note.
pub(super) const TRANSFORMER_ENGINE: &str = "a transformer_engine object";

const PACKED: [&str; 10] = [
    "torch._utils._rebuild_sparse_tensor",
    "torch._utils._rebuild_sparse_csr_tensor",
    "torch._utils._rebuild_nested_tensor",
    "torch._utils._rebuild_qtensor",
    "torch._utils._rebuild_meta_tensor_no_storage",
    "torch._utils._rebuild_wrapper_subclass",
    "torch._utils._rebuild_device_tensor_from_numpy",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor",
    "torch._utils._rebuild_xla_tensor",
    "torch._utils._rebuild_mlc_tensor",
];
