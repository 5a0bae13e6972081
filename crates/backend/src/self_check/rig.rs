//! A device with what moving values there and back takes. Slow: every move waits.

use std::cell::RefCell;

use super::kv_words;
use crate::{
    Backend, BackendError, Dtype, HostTensor, KvLayer, KvLayout, TensorData, philox,
    quant::random_row,
};
use half::{bf16, f16};

/// A device, a stream of it and an event at the stream's end.
pub(super) struct Rig<'a, B: Backend> {
    pub(super) backend: &'a B,
    pub(super) stream: B::Stream,
    done: B::Event,
    /// What values pass through, and its words: getting such memory takes longer than a copy.
    host: RefCell<(B::HostBuffer, usize)>,
}

/// Words that most moves have room in.
const HOST_WORDS: usize = 1 << 16;

impl<'a, B: Backend> Rig<'a, B> {
    pub(super) fn new(backend: &'a B) -> Result<Self, BackendError> {
        let (stream, done) = (backend.create_stream("check")?, backend.create_event()?);
        let host = RefCell::new((backend.alloc_host("check", HOST_WORDS)?, HOST_WORDS));
        Ok(Self { backend, stream, done, host })
    }

    /// Activations with these values.
    pub(super) fn activations(&self, values: &[f32]) -> Result<B::Buffer, BackendError> {
        let buffer = self.backend.alloc_activations("check", values.len())?;
        self.write(&buffer, values, self.backend.activation_dtype())?;
        Ok(buffer)
    }

    /// Activations to be written by an operator, filled with what cannot be right.
    pub(super) fn poisoned(&self, len: usize) -> Result<B::Buffer, BackendError> {
        self.activations(&vec![f32::NAN; len])
    }

    /// As [`Rig::activations`], in f32 on every device.
    pub(super) fn state(&self, values: &[f32]) -> Result<B::Buffer, BackendError> {
        let buffer = self.backend.alloc_f32("check", values.len())?;
        self.write(&buffer, values, Dtype::F32)?;
        Ok(buffer)
    }

    /// Words with these values.
    pub(super) fn words(&self, values: &[u32]) -> Result<B::Buffer, BackendError> {
        let buffer = self.backend.alloc_words("check", values.len())?;
        self.write_words(&buffer, values)?;
        Ok(buffer)
    }

    /// A vector of weights.
    pub(super) fn vector(&self, values: &[f32]) -> Result<B::Buffer, BackendError> {
        self.backend.load_vector(&[tensor(&[values.len()], values)])
    }

    /// Keys and values of a cache with these numbers, `[num_blocks, num_kv_heads, block_size,
    /// head_dim]`.
    pub(super) fn kv(
        &self,
        layout: KvLayout,
        keys: &[f32],
        values: &[f32],
    ) -> Result<KvLayer<B>, BackendError> {
        let cache = |numbers: &[f32]| {
            let words = kv_words::encode(&layout, numbers);
            let buffer = self.backend.alloc_kv("check", words.len() * 4)?;
            self.write_words(&buffer, &words)?;
            Ok::<_, BackendError>(buffer)
        };
        Ok(KvLayer { keys: cache(keys)?, values: cache(values)? })
    }

    pub(super) fn read_activations(
        &self,
        buffer: &B::Buffer,
        len: usize,
    ) -> Result<Vec<f32>, BackendError> {
        self.read(buffer, len, self.backend.activation_dtype())
    }

    /// The numbers of a cache of `num_blocks` blocks, as [`Rig::kv`] takes them.
    pub(super) fn read_kv(
        &self,
        buffer: &B::Buffer,
        layout: KvLayout,
        num_blocks: usize,
    ) -> Result<Vec<f32>, BackendError> {
        let words = self.read_words(buffer, num_blocks * layout.block_bytes() / 4)?;
        Ok(kv_words::decode(&layout, &words))
    }

    pub(super) fn read_state(
        &self,
        buffer: &B::Buffer,
        len: usize,
    ) -> Result<Vec<f32>, BackendError> {
        self.read(buffer, len, Dtype::F32)
    }

    pub(super) fn read_words(
        &self,
        buffer: &B::Buffer,
        len: usize,
    ) -> Result<Vec<u32>, BackendError> {
        self.through_host(len, |host| {
            self.backend.copy_to_host(buffer, host, len, &self.stream)?;
            self.finish()?;
            Ok(self.backend.read_host(host, |words| words[..len].to_vec()))
        })
    }

    pub(super) fn write_words(
        &self,
        buffer: &B::Buffer,
        values: &[u32],
    ) -> Result<(), BackendError> {
        let len = values.len();
        self.through_host(len, |host| {
            self.backend.write_host(host, |words| words[..len].copy_from_slice(values));
            self.backend.copy_to_device(host, buffer, len, &self.stream)?;
            self.finish()
        })
    }

    /// Calls `move_values` with host memory of `len` words, which nothing enqueued uses.
    fn through_host<T>(
        &self,
        len: usize,
        move_values: impl FnOnce(&mut B::HostBuffer) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let mut host = self.host.borrow_mut();
        if host.1 < len {
            let num_words = len.next_power_of_two();
            *host = (self.backend.alloc_host("check", num_words)?, num_words);
        }
        move_values(&mut host.0)
    }

    /// Waits for all that was enqueued.
    pub(super) fn finish(&self) -> Result<(), BackendError> {
        self.backend.record(&self.done, &self.stream)?;
        self.backend.synchronize(&self.done)
    }

    fn write(&self, buffer: &B::Buffer, values: &[f32], dtype: Dtype) -> Result<(), BackendError> {
        let bits = |value: f32| match dtype {
            Dtype::F16 => u32::from(f16::from_f32(value).to_bits()),
            _ => u32::from(bf16::from_f32(value).to_bits()),
        };
        let words: Vec<u32> = match dtype {
            Dtype::F32 => values.iter().map(|value| value.to_bits()).collect(),
            Dtype::F16 | Dtype::BF16 => {
                let pairs = values.chunks(2);
                pairs.map(|pair| pair.iter().rev().fold(0, |w, v| w << 16 | bits(*v))).collect()
            }
            other => unreachable!("no device computes in {other}"),
        };
        self.write_words(buffer, &words)
    }

    fn read(&self, buffer: &B::Buffer, len: usize, dtype: Dtype) -> Result<Vec<f32>, BackendError> {
        let halves = |word: u32| [word as u16, (word >> 16) as u16];
        Ok(match dtype {
            Dtype::F32 => self.read_words(buffer, len)?.into_iter().map(f32::from_bits).collect(),
            Dtype::F16 | Dtype::BF16 => {
                let value = |bits| match dtype {
                    Dtype::F16 => f16::from_bits(bits).to_f32(),
                    _ => bf16::from_bits(bits).to_f32(),
                };
                let words = self.read_words(buffer, len.div_ceil(2))?;
                words.into_iter().flat_map(halves).take(len).map(value).collect()
            }
            other => unreachable!("no device computes in {other}"),
        })
    }
}

/// A weight with these values.
pub(super) fn tensor(shape: &[usize], values: &[f32]) -> HostTensor {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let data = TensorData::Owned(bytes.into());
    HostTensor { name: "check".into(), dtype: Dtype::F32, shape: shape.to_vec(), data }
}

/// Normally distributed values that bf16 has exactly, so that all devices get the same inputs.
pub(super) fn normal(seed: u64, len: usize) -> Vec<f32> {
    let mut values = vec![0.0; len];
    random_row(seed, 1.0, 0, &mut values);
    values.iter().map(|value| bf16::from_f32(*value).to_f32()).collect()
}

/// Uniform numbers below `end`.
pub(super) fn uniform(seed: u64, len: usize, end: usize) -> Vec<u32> {
    let draw = |i| (philox::uniform(seed, i) * end as f64) as u32;
    (0..u32::try_from(len).expect("checks are small")).map(draw).collect()
}
