//! The table of tensors: where each lies, checked against the file and against each other.

use std::{collections::HashMap, ops::Range};

use inflight_backend::Dtype;

use super::cursor::Cursor;
use crate::ModelError;

/// Where a tensor lies and what it is.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TensorInfo {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    /// Outermost first; the file has them innermost first.
    pub(super) shape: Vec<usize>,
    /// Bytes in the file.
    pub(super) range: Range<usize>,
}

/// Fewest bytes of a table entry: empty name, no dimension, type, offset.
pub(super) const MIN_ENTRY_BYTES: usize = 8 + 4 + 4 + 8;
const MAX_DIMS: u32 = 4;

/// Reads `count` entries. Their ranges still count from the start of the data.
pub(super) fn read_entries(
    cursor: &mut Cursor<'_>,
    count: usize,
) -> Result<Vec<TensorInfo>, ModelError> {
    (0..count).map(|_| read_entry(cursor)).collect()
}

fn read_entry(cursor: &mut Cursor<'_>) -> Result<TensorInfo, ModelError> {
    let name = cursor.string("a tensor's name")?;
    let what = format!("the entry of tensor {name}");
    let path = cursor.path();
    let error = |reason: String| ModelError::bad_tensor(path, name, reason);
    let num_dims = cursor.u32(&what)?;
    if num_dims == 0 || num_dims > MAX_DIMS {
        return Err(error(format!("{num_dims} dimensions; 1 to {MAX_DIMS} can be read")));
    }
    let mut shape = Vec::new();
    for _ in 0..num_dims {
        let extent = cursor.u64(&what)?;
        let extent = usize::try_from(extent).ok().filter(|extent| *extent > 0);
        shape.push(extent.ok_or_else(|| error("an extent is zero or too large".into()))?);
    }
    shape.reverse();
    let code = cursor.u32(&what)?;
    let dtype = dtype_of(code).ok_or_else(|| error(unsupported_type(code)))?;
    let offset = cursor.u64(&what)?;
    let len = tensor_bytes(dtype, &shape).map_err(&error)?;
    let range = usize::try_from(offset).ok().and_then(|start| Some(start..start.checked_add(len)?));
    let range = range.ok_or_else(|| error(format!("offset {offset} is too large")))?;
    Ok(TensorInfo { name: name.to_owned(), dtype, shape, range })
}

fn tensor_bytes(dtype: Dtype, shape: &[usize]) -> Result<usize, String> {
    let (row_len, outer) = shape.split_last().expect("there is at least one dimension");
    if !row_len.is_multiple_of(dtype.block_len()) {
        return Err(format!(
            "rows of {row_len} elements are not whole {dtype} blocks of {}",
            dtype.block_len()
        ));
    }
    let row_bytes = dtype.row_bytes(*row_len);
    let bytes = outer.iter().try_fold(row_bytes, |bytes, n| Some(bytes?.checked_mul(*n)));
    bytes.flatten().ok_or_else(|| format!("shape {shape:?} is too large"))
}

/// Moves all ranges to where the data starts, and refuses tensors that are not aligned, leave the
/// file, share bytes or bear the same name.
pub(super) fn place(
    path: &str,
    tensors: &mut [TensorInfo],
    data: Range<usize>,
    alignment: usize,
) -> Result<(), ModelError> {
    for info in &mut *tensors {
        let error = |reason: String| ModelError::bad_tensor(path, &info.name, reason);
        if !info.range.start.is_multiple_of(alignment) {
            let start = info.range.start;
            return Err(error(format!("offset {start} is not a multiple of {alignment}")));
        }
        let end = info.range.end.checked_add(data.start).filter(|end| *end <= data.end);
        let end = end.ok_or_else(|| {
            error(format!(
                "the file is truncated: {} bytes at offset {} of the data, which has {}",
                info.range.len(),
                info.range.start,
                data.len()
            ))
        })?;
        info.range = data.start + info.range.start..end;
    }
    check_overlaps(path, tensors)
}

fn check_overlaps(path: &str, tensors: &[TensorInfo]) -> Result<(), ModelError> {
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|info| info.range.start);
    for pair in order.windows(2) {
        if pair[1].range.start < pair[0].range.end {
            let reason = format!("shares bytes with tensor {}", pair[0].name);
            return Err(ModelError::bad_tensor(path, &pair[1].name, reason));
        }
    }
    Ok(())
}

/// The entries' places by name.
pub(super) fn index(
    path: &str,
    tensors: &[TensorInfo],
) -> Result<HashMap<String, usize>, ModelError> {
    let mut by_name = HashMap::new();
    for (i, info) in tensors.iter().enumerate() {
        if by_name.insert(info.name.clone(), i).is_some() {
            return Err(ModelError::bad_tensor(path, &info.name, "occurs twice"));
        }
    }
    Ok(by_name)
}

fn dtype_of(code: u32) -> Option<Dtype> {
    Some(match code {
        0 => Dtype::F32,
        1 => Dtype::F16,
        2 => Dtype::Q4_0,
        3 => Dtype::Q4_1,
        6 => Dtype::Q5_0,
        7 => Dtype::Q5_1,
        8 => Dtype::Q8_0,
        12 => Dtype::Q4K,
        13 => Dtype::Q5K,
        14 => Dtype::Q6K,
        30 => Dtype::BF16,
        _ => return None,
    })
}

/// Says which type it is, by the names of ggml's table.
fn unsupported_type(code: u32) -> String {
    const NAMED: &[(u32, &str)] = &[
        (9, "Q8_1"),
        (10, "Q2_K"),
        (11, "Q3_K"),
        (15, "Q8_K"),
        (16, "IQ2_XXS"),
        (17, "IQ2_XS"),
        (18, "IQ3_XXS"),
        (19, "IQ1_S"),
        (20, "IQ4_NL"),
        (21, "IQ3_S"),
        (22, "IQ2_S"),
        (23, "IQ4_XS"),
        (24, "I8"),
        (25, "I16"),
        (26, "I32"),
        (27, "I64"),
        (28, "F64"),
        (29, "IQ1_M"),
        (34, "TQ1_0"),
        (35, "TQ2_0"),
        (39, "MXFP4"),
    ];
    let known = "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K";
    match NAMED.iter().find(|(named, _)| *named == code) {
        Some((_, name)) => format!("type {name} is not supported; {known} are"),
        None => format!("unknown type {code}; {known} are supported"),
    }
}
