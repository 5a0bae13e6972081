//! One tenant floods; another, which asks for little, must not feel it.

use std::time::Duration;

use anyhow::Result;
use inflight_engine::{Order, Policy, Targets, Tuning};
use serde::Serialize;

use super::load::{Arrival, Rig, Served};
use super::quantile;

/// How it is run.
#[derive(Clone, Debug)]
pub struct Tenants {
    /// Tokens of every prompt.
    pub prompt_len: usize,
    /// Tokens of every output.
    pub output_len: usize,
    /// Requests of the modest tenant, one after the other at this distance.
    pub num_modest: usize,
    /// Time between two of them.
    pub every: Duration,
    /// Requests of the flooding tenant, all there from the start.
    pub num_flood: usize,
}

/// One run: what the modest tenant felt.
#[derive(Clone, Debug, Serialize)]
pub struct TenantsRow {
    /// `alone`, `fcfs`, `fair`, or `fair, target` with a target for the time between tokens of 1.3
    /// times what it is alone.
    pub mode: &'static str,
    /// From arrival to last token.
    pub latency_p50_s: f64,
    /// The same.
    pub latency_p95_s: f64,
    /// From arrival to first token.
    pub ttft_p50_s: f64,
    /// Between two tokens.
    pub itl_p50_ms: f64,
    /// Median latency in proportion to being alone.
    pub slowdown: f64,
}

/// Runs the modest tenant alone and then beside the flood, by every order.
///
/// # Errors
/// The engine fails.
pub fn run_tenants(
    rig: &mut Rig,
    tenants: &Tenants,
    show: &mut dyn FnMut(&TenantsRow),
) -> Result<Vec<TenantsRow>> {
    let modest: Vec<_> = (0..tenants.num_modest).map(|i| arrival(tenants, i)).collect();
    let flood = Arrival { at: Duration::ZERO, tenant: "flood", ..arrival(tenants, 0) };
    let both = [vec![flood; tenants.num_flood], modest.clone()].concat();
    let tuning = |order, itl| Tuning {
        overlap: true,
        policy: Policy { order, targets: Targets { itl, ttft: None }, ..Policy::default() },
    };
    let alone = rig.run(&tuning(Order::Fcfs, None), &modest)?;
    let alone = summarize("alone", &alone, None);
    show(&alone);
    let target = Duration::from_secs_f64(1.3e-3 * alone.itl_p50_ms);
    let modes = [
        ("fcfs", Order::Fcfs, None),
        ("fair", Order::Fair, None),
        ("fair, target", Order::Fair, Some(target)),
    ];
    let mut rows = vec![alone.clone()];
    for (mode, order, itl) in modes {
        let served = rig.run(&tuning(order, itl), &both)?;
        let row = summarize(mode, &served[tenants.num_flood..], Some(&alone));
        show(&row);
        rows.push(row);
    }
    Ok(rows)
}

fn arrival(tenants: &Tenants, i: usize) -> Arrival {
    Arrival {
        at: tenants.every * u32::try_from(i + 1).unwrap_or(u32::MAX),
        prompt_len: tenants.prompt_len,
        output_len: tenants.output_len,
        tenant: "modest",
    }
}

fn summarize(mode: &'static str, served: &[Served], alone: Option<&TenantsRow>) -> TenantsRow {
    let mut latencies: Vec<_> = served.iter().map(Served::latency_s).collect();
    let mut firsts: Vec<_> = served.iter().map(Served::first_token_s).collect();
    let mut gaps: Vec<_> = served.iter().flat_map(Served::gaps_s).map(|s| 1e3 * s).collect();
    let latency_p50_s = quantile(&mut latencies, 0.5);
    TenantsRow {
        mode,
        latency_p50_s,
        latency_p95_s: quantile(&mut latencies, 0.95),
        ttft_p50_s: quantile(&mut firsts, 0.5),
        itl_p50_ms: quantile(&mut gaps, 0.5),
        slowdown: alone.map_or(1.0, |alone| latency_p50_s / alone.latency_p50_s.max(1e-9)),
    }
}
