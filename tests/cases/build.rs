//! Dump files made byte by byte, so that any one of them can be wrong.

use std::io::Write;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::DeflateEncoder;

/// An `.npy` of version 1 around any header text.
pub fn npy(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

/// An honest `.npy`.
pub fn npy_of(descr: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    npy(
        &format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n"),
        data,
    )
}

pub fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// A `.safetensors` around any header text.
pub fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

/// A member of a zip archive, and what the directory says of it.
#[derive(Clone)]
pub struct Member {
    pub name: String,
    pub packed: Vec<u8>,
    pub size: u32,
    pub crc: u32,
    pub method: u16,
    pub flags: u16,
    /// Where the directory says it lies, if not where it does.
    pub header: Option<u32>,
    /// The name in its own header.
    pub local_name: String,
}

pub fn stored(name: &str, data: &[u8]) -> Member {
    let mut crc = flate2::Crc::new();
    crc.update(data);
    Member {
        name: name.to_string(),
        packed: data.to_vec(),
        size: data.len() as u32,
        crc: crc.sum(),
        method: 0,
        flags: 0,
        header: None,
        local_name: name.to_string(),
    }
}

pub fn deflated(name: &str, data: &[u8]) -> Member {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(data).expect("deflated");
    Member {
        packed: encoder.finish().expect("deflated"),
        method: 8,
        ..stored(name, data)
    }
}

/// A zip archive; `wide` adds the 64-bit end of directory, as torch does.
pub fn zip(members: &[Member], wide: bool) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut directory = Vec::new();
    for m in members {
        let header = m.header.unwrap_or(bytes.len() as u32);
        let common = |name: &str| {
            let mut fields = Vec::new();
            for field in [20, m.flags, m.method, 0, 0] {
                fields.extend(field.to_le_bytes());
            }
            fields.extend(m.crc.to_le_bytes());
            fields.extend((m.packed.len() as u32).to_le_bytes());
            fields.extend(m.size.to_le_bytes());
            fields.extend((name.len() as u16).to_le_bytes());
            fields.extend(0u16.to_le_bytes());
            fields
        };
        bytes.extend(b"PK\x03\x04");
        bytes.extend(common(&m.local_name));
        bytes.extend(m.local_name.as_bytes());
        bytes.extend(&m.packed);
        directory.extend(b"PK\x01\x02");
        directory.extend(20u16.to_le_bytes());
        directory.extend(common(&m.name));
        directory.extend([0u8; 10]);
        directory.extend(header.to_le_bytes());
        directory.extend(m.name.as_bytes());
    }
    let start = bytes.len() as u64;
    let (size, count) = (directory.len() as u64, members.len() as u64);
    bytes.extend(&directory);
    if wide {
        let end = bytes.len() as u64;
        bytes.extend(b"PK\x06\x06");
        bytes.extend(44u64.to_le_bytes());
        bytes.extend([45, 0, 45, 0]);
        bytes.extend([0u8; 8]);
        for field in [count, count, size, start] {
            bytes.extend(field.to_le_bytes());
        }
        bytes.extend(b"PK\x06\x07");
        bytes.extend(0u32.to_le_bytes());
        bytes.extend(end.to_le_bytes());
        bytes.extend(1u32.to_le_bytes());
    }
    bytes.extend(b"PK\x05\x06");
    bytes.extend([0u8; 4]);
    bytes.extend((count as u16).to_le_bytes());
    bytes.extend((count as u16).to_le_bytes());
    bytes.extend((size as u32).to_le_bytes());
    bytes.extend((start as u32).to_le_bytes());
    bytes.extend(0u16.to_le_bytes());
    bytes
}

/// A pickle under construction.
#[derive(Clone, Default)]
pub struct Pickle(pub Vec<u8>);

impl Pickle {
    pub fn new() -> Pickle {
        Pickle(vec![0x80, 2])
    }
    pub fn raw(mut self, bytes: &[u8]) -> Pickle {
        self.0.extend(bytes);
        self
    }
    pub fn text(self, text: &str) -> Pickle {
        self.raw(b"X")
            .raw(&(text.len() as u32).to_le_bytes())
            .raw(text.as_bytes())
    }
    pub fn int(self, int: i32) -> Pickle {
        self.raw(b"J").raw(&int.to_le_bytes())
    }
    pub fn float(self, float: f64) -> Pickle {
        self.raw(b"G").raw(&float.to_be_bytes())
    }
    pub fn global(self, module: &str, name: &str) -> Pickle {
        self.raw(format!("c{module}\n{name}\n").as_bytes())
    }
    pub fn ints(self, ints: &[i32]) -> Pickle {
        ints.iter()
            .fold(self.raw(b"("), |pickle, &int| pickle.int(int))
            .raw(b"t")
    }
    pub fn storage(self, kind: &str, key: &str, elements: i32) -> Pickle {
        let pickle = self
            .raw(b"(")
            .text("storage")
            .global("torch", kind)
            .text(key)
            .text("cpu");
        pickle.int(elements).raw(b"tQ")
    }
    /// A tensor over a whole storage of `elements`.
    pub fn tensor(
        self,
        kind: &str,
        key: &str,
        elements: i32,
        offset: i32,
        shape: &[i32],
        strides: &[i32],
    ) -> Pickle {
        let pickle = self
            .global("torch._utils", "_rebuild_tensor_v2")
            .raw(b"(")
            .storage(kind, key, elements);
        let pickle = pickle.int(offset).ints(shape).ints(strides).raw(b"\x89");
        pickle.global("collections", "OrderedDict").raw(b")RtR")
    }
    pub fn stop(self) -> Vec<u8> {
        self.raw(b".").0
    }
}

/// A zip of `torch.save`.
pub fn pt(pickle: Vec<u8>, storages: &[(&str, &[u8])]) -> Vec<u8> {
    let mut members = vec![
        stored("a/data.pkl", &pickle),
        stored("a/byteorder", b"little"),
    ];
    members.extend(
        storages
            .iter()
            .map(|(key, data)| stored(&format!("a/data/{key}"), data)),
    );
    members.push(stored("a/version", b"3\n"));
    zip(&members, true)
}

/// A legacy file of `torch.save`.
pub fn legacy(little_endian: bool, object: Vec<u8>, storages: &[(&str, u64, &[u8])]) -> Vec<u8> {
    let mut bytes =
        b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.".to_vec();
    let flag: &[u8] = if little_endian { b"\x88" } else { b"\x89" };
    bytes.extend(
        Pickle::new()
            .raw(b"}(")
            .text("little_endian")
            .raw(flag)
            .raw(b"u")
            .stop(),
    );
    bytes.extend(object);
    let keys = storages
        .iter()
        .fold(Pickle::new().raw(b"]("), |pickle, (key, _, _)| {
            pickle.text(key)
        });
    bytes.extend(keys.raw(b"e").stop());
    for (_, count, data) in storages {
        bytes.extend(count.to_le_bytes());
        bytes.extend(*data);
    }
    bytes
}

/// Writes a file into a folder.
pub fn write(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
    std::fs::write(&path, bytes).expect("written");
    path
}

/// One small honest file of each kind.
pub fn small() -> Vec<(&'static str, Vec<u8>)> {
    let six = f32s(&[0.0, -1.5, f32::INFINITY, f32::NAN, 1e-40, 3e38]);
    let ints = npy_of("<i8", "()", &7u64.to_le_bytes());
    let dict = || {
        Pickle::new()
            .raw(b"}(")
            .text("w")
            .tensor("FloatStorage", "0", 6, 0, &[3, 2], &[1, 3])
    };
    let dict = || {
        dict()
            .text("v")
            .tensor("FloatStorage", "0", 6, 1, &[2, 2], &[0, 4])
            .raw(b"u")
            .stop()
    };
    let header =
        r#"{"__metadata__":{"step":"3"},"a":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]}}"#;
    vec![
        ("small.npy", npy_of("<f4", "(2, 3)", &six)),
        (
            "stored.npz",
            zip(
                &[
                    stored("a.npy", &npy_of("<f4", "(6,)", &six)),
                    stored("step.npy", &ints),
                ],
                false,
            ),
        ),
        (
            "deflated.npz",
            zip(&[deflated("a.npy", &npy_of("<f4", "(6,)", &six))], false),
        ),
        ("small.safetensors", safetensors(header, &six)),
        ("zip.pt", pt(dict(), &[("0", &six)])),
        ("legacy.pt", legacy(true, dict(), &[("0", 6, &six)])),
    ]
}
