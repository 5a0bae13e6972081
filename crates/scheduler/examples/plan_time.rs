//! How long planning a batch takes:
//! `cargo run --release -p inflight-scheduler --example plan_time`.
//!
//! Every row decodes, a thousand more sequences wait, and one sequence in 64 ends and is replaced
//! in each step, as under load. Prints the median and the 99th percentile of `plan` alone.

use std::time::{Duration, Instant};

use inflight_scheduler::{
    MemoryConfig, Order, Policy, Preemption, Scheduler, SchedulerConfig, SequenceId, SequenceSpec,
    Service, Targets, Tenant,
};

const NUM_STEPS: usize = 2000;
const NUM_WAITING: usize = 1000;
const BLOCK_SIZE: usize = 16;

fn main() {
    println!("rows  policy          p50 us  p99 us");
    for num_rows in [256, 1024] {
        let targets = Targets { itl: Some(Duration::from_secs(1)), ..Targets::default() };
        let policies = [
            ("fcfs", Policy::default()),
            ("priority", Policy { order: Order::Priority, ..Policy::default() }),
            ("fair", Policy { order: Order::Fair, ..Policy::default() }),
            ("fair, targets", Policy { order: Order::Fair, targets, ..Policy::default() }),
        ];
        for (name, policy) in policies {
            let mut micros = measure(num_rows, policy);
            micros.sort_unstable_by(f64::total_cmp);
            let (p50, p99) = (micros[micros.len() / 2], micros[micros.len() * 99 / 100]);
            println!("{num_rows:4}  {name:14}  {p50:6.1}  {p99:6.1}");
        }
    }
}

/// Microseconds of each plan.
fn measure(num_rows: usize, policy: Policy) -> Vec<f64> {
    let mut scheduler = Scheduler::new(SchedulerConfig {
        other_windows: Vec::new(),
        max_num_seqs: num_rows,
        max_num_batched_tokens: 8192,
        max_model_len: 4096,
        block_size: BLOCK_SIZE,
        num_blocks: num_rows * 4096 / BLOCK_SIZE,
        memory: MemoryConfig {
            prefix_caching: true,
            preemption: Preemption::Auto,
            num_swap_blocks: 0,
            keeps_cold_prefixes: false,
            max_moved_blocks: 0,
        },
    })
    .expect("the limits are sound");
    scheduler.set_policy(policy).expect("the policy is sound");
    let mut next_id = 0;
    let mut add = |scheduler: &mut Scheduler| {
        let id = SequenceId(next_id);
        let prompt = (0..64).map(|i| (next_id * 64 + i) as u32).collect();
        let service = Service {
            priority: (next_id % 7) as i32,
            tenant: Tenant::named(&format!("tenant {}", next_id % 100)),
            deadline: None,
        };
        let max_tokens = 32 + (next_id % 64) as usize;
        let spec = SequenceSpec { max_tokens, service, ..SequenceSpec::new(id, prompt) };
        scheduler.add(spec).expect("it fits");
        next_id += 1;
    };
    (0..num_rows + NUM_WAITING).for_each(|_| add(&mut scheduler));
    let mut micros = Vec::with_capacity(NUM_STEPS);
    for step in 0..NUM_STEPS + 100 {
        let started = Instant::now();
        let batch = scheduler.plan().expect("somebody needs a row");
        if step >= 100 && batch.rows.len() >= num_rows - num_rows / 8 {
            micros.push(1e6 * started.elapsed().as_secs_f64());
        }
        scheduler.advance(&batch);
        scheduler.collect(&batch);
        scheduler.observe(&batch, Duration::from_millis(10));
        for row in batch.sampled_rows() {
            if scheduler.commit(row.id, 1).is_some_and(|commit| commit.finish.is_some()) {
                add(&mut scheduler);
            }
        }
    }
    micros
}
