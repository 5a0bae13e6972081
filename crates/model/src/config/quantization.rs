//! What `quantization_config` says of the weights, as far as it can be run.
//!
//! Which matrices are in fp8 the files tell, tensor by tensor: `ignore` lists and targets are not
//! needed. How activations were to be rounded (`activation_scheme`, `input_scale`) is not followed:
//! they are never rounded more than a scale for each token allows.

use serde_json::Value;

use super::Fields;
use crate::ModelError;

/// How linear layers come to have weights in fp8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Weights {
    /// The files hold them so, but for the layers that they hold otherwise.
    Stored,
    /// All are rounded when loaded, with a scale for each row.
    AtLoad,
    /// The output matrix as well.
    AllAtLoad,
}

/// Blocks that may share a scale.
const BLOCK: [u64; 2] = [128, 128];
const FIELD: &str = "quantization_config";
const KNOWN: &str = "known are fp8, and compressed-tensors in its format float-quantized";

impl Fp8Weights {
    /// Reads `quantization_config`; `None` if there is none.
    ///
    /// # Errors
    /// [`ModelError::BadConfig`] naming a scheme that is not known.
    pub(super) fn from_json(fields: &Fields<'_>) -> Result<Option<Self>, ModelError> {
        let Some(quantization) = fields.object(FIELD)? else { return Ok(None) };
        match quantization.string("quant_method")? {
            Some("fp8") => check_fp8(&quantization)?,
            Some("compressed-tensors") => check_compressed_tensors(&quantization)?,
            Some(other) => {
                let reason = format!("{other} is not supported; {KNOWN}");
                return Err(quantization.error("quant_method", reason));
            }
            None => {
                let reason = format!("is missing; {KNOWN}");
                return Err(quantization.error("quant_method", reason));
            }
        }
        Ok(Some(Self::Stored))
    }
}

/// As DeepSeek and Qwen publish them, with blocks, and as older versions of vLLM's tools wrote
/// them, with one scale for a matrix.
fn check_fp8(fields: &Fields<'_>) -> Result<(), ModelError> {
    if let Some(format) = fields.string("fmt")?.filter(|format| *format != "e4m3") {
        return Err(fields.error("fmt", format!("{format} is not supported, e4m3 is")));
    }
    match fields.value("weight_block_size") {
        Some(size) if !is_block(size) => {
            Err(fields.error("weight_block_size", format!("{size} is not supported, [128,128] is")))
        }
        _ => Ok(()),
    }
}

fn check_compressed_tensors(fields: &Fields<'_>) -> Result<(), ModelError> {
    let format = fields.string("format")?.unwrap_or("without a format");
    if !["float-quantized", "naive-quantized"].contains(&format) {
        let reason = format!("compressed-tensors {format} is not supported; {KNOWN}");
        return Err(fields.error("format", reason));
    }
    let groups = fields.value("config_groups").and_then(Value::as_object);
    let groups = groups.ok_or_else(|| fields.error("config_groups", "must be an object"))?;
    for (name, group) in groups {
        let weights = &group["weights"];
        let kind = (weights["type"].as_str(), weights["num_bits"].as_u64());
        let block = &weights["block_structure"];
        let supported = match weights["strategy"].as_str() {
            Some("tensor" | "channel") => true,
            Some("block") => is_block(block),
            _ => false,
        };
        if kind != (Some("float"), Some(8)) || !supported {
            let Value::Object(weights) = weights else {
                return Err(fields.error("config_groups", format!("{name} lacks weights")));
            };
            let scheme = ["type", "num_bits", "strategy", "block_structure"]
                .map(|key| weights.get(key).map_or(String::from("none"), Value::to_string));
            let reason = format!(
                "{name} has weights of type {}, bits {}, strategy {}, blocks {}; supported is type \
                 \"float\" of 8 bits with a scale for each tensor, channel or block of 128x128",
                scheme[0], scheme[1], scheme[2], scheme[3]
            );
            return Err(fields.error("config_groups", reason));
        }
    }
    Ok(())
}

fn is_block(size: &Value) -> bool {
    let size = size.as_array().map(|size| size.iter().map(Value::as_u64).collect::<Vec<_>>());
    size.is_some_and(|size| size == BLOCK.map(Some))
}
