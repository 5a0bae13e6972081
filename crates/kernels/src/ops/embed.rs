//! Looking up token embeddings.

use crate::{Budget, DevicePtr, Element, Kernel, KernelSpec, Launch, Source};

/// `out[t] = table[token_ids[t]] * scale`; zeros where the id lies outside the table.
#[derive(Clone, Copy, Debug)]
pub struct Embed {
    /// Type of the table.
    pub table: Element,
    /// Type of the result.
    pub out: Element,
}

/// Arguments of [`Embed`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct EmbedParams {
    /// `[num_embeddings, len]`.
    pub table: DevicePtr,
    /// `[num_tokens]`.
    pub token_ids: DevicePtr,
    /// `[num_tokens, len]`.
    pub out: DevicePtr,
    pub num_tokens: u32,
    pub num_embeddings: u32,
    pub len: u32,
    pub scale: f32,
}

impl Embed {
    const THREADS: u32 = 256;
}

impl Kernel for Embed {
    type Params = EmbedParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source { file: "embed.cu", text: include_str!("../../csrc/embed.cu") },
            entry: "embed",
            defines: vec![
                ("THREADS", Self::THREADS),
                ("TABLE_IS_BF16", self.table.is_bf16()),
                ("OUT_IS_BF16", self.out.is_bf16()),
            ],
            dynamic_smem: 0,
            params_bytes: size_of::<EmbedParams>(),
            budget: Budget { registers: 64, static_smem: 0 },
        }
    }

    fn launch(&self, params: &EmbedParams) -> Launch {
        Launch::linear(params.num_tokens, Self::THREADS)
    }
}
