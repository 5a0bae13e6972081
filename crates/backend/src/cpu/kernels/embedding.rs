//! Looking up token embeddings.

use super::Cores;
use crate::{HostTensor, cpu::pool::SharedMut};

/// `out[t] = table[token_ids[t]] * scale`, `[num_tokens, hidden]`, straight from the stored type.
///
/// # Panics
/// If a token id lies outside the table.
pub(crate) fn embed(
    cores: Cores<'_>,
    (table, scale): (&HostTensor, f32),
    token_ids: &[u32],
    out: &mut [f32],
) {
    let len = table.row_len();
    let out = SharedMut::new(out);
    cores.for_rows(token_ids.len(), len, |tokens| {
        // SAFETY: tokens of different tasks are different.
        let out = unsafe { out.slice(tokens.start * len..tokens.end * len) };
        for (id, row) in token_ids[tokens].iter().zip(out.chunks_exact_mut(len.max(1))) {
            let id = *id as usize;
            assert!(id < table.num_rows(), "token {id} of {} {}", table.num_rows(), table.name);
            table.read_row(id, row);
            if scale != 1.0 {
                row.iter_mut().for_each(|x| *x *= scale);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use std::{
        panic::{AssertUnwindSafe, catch_unwind},
        sync::Arc,
    };

    use super::*;
    use crate::{Dtype, TensorData, cpu::kernels::testing::at_every_level};

    fn table(dtype: Dtype, shape: [usize; 2], data: TensorData) -> HostTensor {
        HostTensor { name: "embedding".into(), dtype, shape: shape.to_vec(), data }
    }

    #[test]
    fn rows_are_looked_up_in_order() {
        let bytes: Vec<u8> = (0..12).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let table = table(Dtype::F32, [4, 3], TensorData::Owned(Arc::from(bytes)));
        at_every_level(|cores| {
            let mut out = [f32::NAN; 10];
            embed(cores, (&table, 1.0), &[3, 0, 3], &mut out);
            assert_eq!(out[..9], [9.0, 10.0, 11.0, 0.0, 1.0, 2.0, 9.0, 10.0, 11.0]);
            embed(cores, (&table, 2.0), &[1], &mut out);
            assert_eq!(out[..4], [6.0, 8.0, 10.0, 0.0]);
            assert!(out[9].is_nan());
        });
    }

    #[test]
    fn random_tables_give_the_rows_of_the_whole() {
        let table = table(Dtype::F32, [50, 40], TensorData::Random { seed: 5, std: 0.02 });
        let whole = table.to_f32();
        let ids: Vec<u32> = (0..1000).map(|i| i * 7 % 50).collect();
        at_every_level(|cores| {
            let mut out = vec![f32::NAN; ids.len() * 40];
            embed(cores, (&table, 1.0), &ids, &mut out);
            for (id, row) in ids.iter().zip(out.chunks(40)) {
                assert_eq!(row, &whole[*id as usize * 40..][..40]);
            }
        });
    }

    #[test]
    fn a_token_outside_the_table_names_itself() {
        let table = table(Dtype::F32, [4, 3], TensorData::Random { seed: 1, std: 1.0 });
        at_every_level(|cores| {
            let look_up = || embed(cores, (&table, 1.0), &[4], &mut [0.0; 3]);
            let panic = catch_unwind(AssertUnwindSafe(look_up)).unwrap_err();
            assert_eq!(panic.downcast_ref::<String>().unwrap(), "token 4 of 4 embedding");
        });
    }
}
