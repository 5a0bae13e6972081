//! Metadata values of a GGUF file.

use super::cursor::Cursor;
use crate::ModelError;

/// A metadata value. Integers and floats of all widths are widened.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum GgufValue {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    String(String),
    Array(Vec<GgufValue>),
}

impl GgufValue {
    /// A whole number that is not negative, however it is stored.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Unsigned(value) => Some(*value),
            Self::Signed(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// A number.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Unsigned(value) => Some(*value as f64),
            Self::Signed(value) => Some(*value as f64),
            Self::Float(value) => Some(*value),
            _ => None,
        }
    }

    /// A truth value.
    pub fn as_bool(&self) -> Option<bool> {
        if let Self::Bool(value) = self { Some(*value) } else { None }
    }

    /// A string.
    pub fn as_str(&self) -> Option<&str> {
        if let Self::String(value) = self { Some(value) } else { None }
    }

    /// An array.
    pub fn as_array(&self) -> Option<&[GgufValue]> {
        if let Self::Array(values) = self { Some(values) } else { None }
    }
}

/// Limits on what metadata may make us allocate: vocabularies of a million tokens fit easily.
pub(super) struct Budget {
    elements_left: usize,
}

const MAX_ELEMENTS: usize = 1 << 23;
const MAX_ARRAY_DEPTH: usize = 4;

impl Budget {
    pub(super) fn new() -> Self {
        Self { elements_left: MAX_ELEMENTS }
    }
}

/// Type codes of metadata values, with the fewest bytes that a value takes.
#[derive(Clone, Copy)]
enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl Kind {
    fn read(cursor: &mut Cursor<'_>, what: &str) -> Result<Self, ModelError> {
        const ALL: [Kind; 13] = [
            Kind::U8,
            Kind::I8,
            Kind::U16,
            Kind::I16,
            Kind::U32,
            Kind::I32,
            Kind::F32,
            Kind::Bool,
            Kind::String,
            Kind::Array,
            Kind::U64,
            Kind::I64,
            Kind::F64,
        ];
        let code = cursor.u32(what)?;
        let known = usize::try_from(code).ok().and_then(|code| ALL.get(code));
        known.copied().ok_or_else(|| cursor.error(format!("{what}: unknown value type {code}")))
    }

    fn min_bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }
}

/// Reads the value of metadata key `key`: its type, then itself.
pub(super) fn read_value(
    cursor: &mut Cursor<'_>,
    key: &str,
    budget: &mut Budget,
) -> Result<GgufValue, ModelError> {
    let what = format!("metadata {key}");
    let kind = Kind::read(cursor, &what)?;
    ValueReader { cursor, what: &what, budget }.value(kind, 0)
}

struct ValueReader<'a, 'file> {
    cursor: &'a mut Cursor<'file>,
    what: &'a str,
    budget: &'a mut Budget,
}

impl ValueReader<'_, '_> {
    fn value(&mut self, kind: Kind, depth: usize) -> Result<GgufValue, ModelError> {
        use GgufValue::{Bool, Float, Signed, String, Unsigned};
        let what = self.what;
        Ok(match kind {
            Kind::U8 => Unsigned(u8::from_le_bytes(self.cursor.array(what)?).into()),
            Kind::I8 => Signed(i8::from_le_bytes(self.cursor.array(what)?).into()),
            Kind::U16 => Unsigned(u16::from_le_bytes(self.cursor.array(what)?).into()),
            Kind::I16 => Signed(i16::from_le_bytes(self.cursor.array(what)?).into()),
            Kind::U32 => Unsigned(self.cursor.u32(what)?.into()),
            Kind::I32 => Signed(i32::from_le_bytes(self.cursor.array(what)?).into()),
            Kind::U64 => Unsigned(self.cursor.u64(what)?),
            Kind::I64 => Signed(i64::from_le_bytes(self.cursor.array(what)?)),
            Kind::F32 => Float(f32::from_le_bytes(self.cursor.array(what)?).into()),
            Kind::F64 => Float(f64::from_le_bytes(self.cursor.array(what)?)),
            Kind::String => String(self.cursor.string(what)?.to_owned()),
            Kind::Bool => match self.cursor.array(what)? {
                [0] => Bool(false),
                [1] => Bool(true),
                [byte] => return Err(self.cursor.error(format!("{what}: {byte} is no bool"))),
            },
            Kind::Array => self.array(depth)?,
        })
    }

    fn array(&mut self, depth: usize) -> Result<GgufValue, ModelError> {
        if depth == MAX_ARRAY_DEPTH {
            let reason = format!("{}: arrays nested more than {MAX_ARRAY_DEPTH} deep", self.what);
            return Err(self.cursor.error(reason));
        }
        let kind = Kind::read(self.cursor, self.what)?;
        let len = self.cursor.count(kind.min_bytes(), self.what)?;
        let Some(left) = self.budget.elements_left.checked_sub(len) else {
            let reason = format!("{}: more than {MAX_ELEMENTS} metadata elements", self.what);
            return Err(self.cursor.error(reason));
        };
        self.budget.elements_left = left;
        (0..len)
            .map(|_| self.value(kind, depth + 1))
            .collect::<Result<_, _>>()
            .map(GgufValue::Array)
    }
}
