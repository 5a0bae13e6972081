//! What a device can do.

/// Rates of a device and of the host that feeds it.
///
/// # Source
/// Sizes and rates of memory and matrix units: the makers' data sheets (dense, without sparsity).
/// What of them kernels reach, and what an operator costs besides: fitted to four figures of one
/// H200 in `docs/BENCHMARKS.md`, 8B in bf16 (a decode step of 1 row and of 256, prefills of 1,024
/// and of 8,192). All other devices are assumed to reach the same shares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gpu {
    /// How users call it.
    pub name: &'static str,
    /// Bytes of its memory.
    pub memory_bytes: f64,
    /// Bytes a second that it copies at best.
    pub bytes_per_s: f64,
    /// Operations a second of matrix products in bf16, at best.
    pub flop_per_s: f64,
    /// The same in fp8; as in bf16 where it has no fp8.
    pub fp8_flop_per_s: f64,
    /// Rows at which a product reaches half of that.
    pub half_rate_rows: f64,
    /// Share of the bandwidth that weights in fp8 are read at.
    pub fp8_bandwidth_share: f64,
    /// Seconds until an operator is under way, however small it is.
    pub operator_s: f64,
    /// Bytes a second between host and device.
    pub link_bytes_per_s: f64,
    /// Seconds until a copy between them is under way.
    pub link_s: f64,
    /// The host.
    pub host: HostCosts,
}

/// Seconds that the host takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostCosts {
    /// To admit, plan and stage a step.
    pub step_s: f64,
    /// The same, for each row.
    pub row_s: f64,
    /// To launch a step that is captured as a graph.
    pub graph_s: f64,
    /// To launch an operator of a step that is not.
    pub launch_s: f64,
}

/// Share of the data sheet's bandwidth that copies reach: 4.3 of 4.8 TB/s on an H200.
const COPY_SHARE: f64 = 4.3 / 4.8;
/// Share of the data sheet's matrix rate that the largest products reach.
const MATRIX_SHARE: f64 = 800.0 / 989.0;

impl Gpu {
    /// Names of all that are known.
    pub const NAMES: [&str; 8] =
        ["h200", "h100", "h100-pcie", "a100", "b200", "l40s", "l4", "rtx4090"];

    /// A device by its name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        // Memory in GB, bandwidth in TB/s, dense bf16 and fp8 in TFLOP/s, link in GB/s.
        let sheet = match name {
            "h200" => (141.0, 4.8, 989.0, 1979.0, 55.0),
            "h100" => (80.0, 3.35, 989.0, 1979.0, 55.0),
            "h100-pcie" => (80.0, 2.0, 756.0, 1513.0, 55.0),
            "a100" => (80.0, 2.039, 312.0, 312.0, 25.0),
            "b200" => (180.0, 8.0, 2250.0, 4500.0, 55.0),
            "l40s" => (48.0, 0.864, 362.0, 733.0, 25.0),
            "l4" => (24.0, 0.3, 121.0, 242.0, 25.0),
            "rtx4090" => (24.0, 1.008, 165.0, 330.0, 25.0),
            _ => return None,
        };
        let name = Self::NAMES.into_iter().find(|known| *known == name)?;
        let (memory_gb, tb_per_s, tflop_per_s, fp8_tflop_per_s, link_gb_per_s) = sheet;
        Some(Self {
            name,
            memory_bytes: memory_gb * 1e9,
            bytes_per_s: COPY_SHARE * tb_per_s * 1e12,
            flop_per_s: MATRIX_SHARE * tflop_per_s * 1e12,
            fp8_flop_per_s: MATRIX_SHARE * fp8_tflop_per_s * 1e12,
            link_bytes_per_s: link_gb_per_s * 1e9,
            ..Self::of_rates(memory_gb * 1e9, 1.0, 1.0)
        })
    }

    /// A device of these rates, as kernels reach them: bytes and operations a second.
    #[must_use]
    pub fn of_rates(memory_bytes: f64, bytes_per_s: f64, flop_per_s: f64) -> Self {
        Self {
            name: "custom",
            memory_bytes,
            bytes_per_s,
            flop_per_s,
            fp8_flop_per_s: flop_per_s,
            half_rate_rows: 138.0,
            fp8_bandwidth_share: 0.72,
            operator_s: 2.3e-6,
            link_bytes_per_s: 25e9,
            link_s: 8e-6,
            host: HostCosts { step_s: 20e-6, row_s: 0.15e-6, graph_s: 60e-6, launch_s: 4e-6 },
        }
    }

    /// A CPU: no graphs to launch and nothing to copy far, and products reach their rate with few
    /// rows. Every operator costs what it takes to bring its threads together.
    #[must_use]
    pub fn cpu(bytes_per_s: f64, flop_per_s: f64) -> Self {
        Self {
            name: "cpu",
            half_rate_rows: 2.5,
            operator_s: 5e-6,
            link_bytes_per_s: bytes_per_s,
            link_s: 2e-6,
            host: HostCosts { step_s: 20e-6, row_s: 0.15e-6, graph_s: 30e-6, launch_s: 0.3e-6 },
            ..Self::of_rates(64e9, bytes_per_s, flop_per_s)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_a_device() {
        for name in Gpu::NAMES {
            let gpu = Gpu::named(name).unwrap();
            assert_eq!(gpu.name, name);
            assert!(gpu.bytes_per_s > 1e11 && gpu.flop_per_s > 1e13, "{name}");
        }
        assert_eq!(Gpu::named("abacus"), None);
    }
}
