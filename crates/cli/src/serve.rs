//! `inflight serve`: serve a model over the OpenAI API.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use inflight_server::{FileStore, ServerConfig, ServerState, Tls, ToolFormat};
use tokio::net::TcpSocket;

use crate::access;
use crate::args::{OrderChoice, ReasoningParser, ServeArgs, Switch, ToolCallParser};
use crate::models::ModelArgument;
use crate::pooling::resolve_pooling;
use crate::progress::is_watched;
use crate::resolve::Workload;
use crate::signals::shutdown_requested;
use crate::start::{Running, start};

/// Connections that the system holds until they are accepted.
const MAX_WAITING_CONNECTIONS: u32 = 1024;

pub(crate) fn serve(args: ServeArgs) -> Result<()> {
    // Before the model is loaded: a port that is taken or a wrong key should not cost minutes.
    let socket = bind(&args.host, args.port)?;
    let mut config = ServerConfig::new(&args.model);
    access::apply(&args.access, &mut config)?;
    let tls = access::tls(&args.access)?;
    config.files = match &args.files_dir {
        Some(folder) => {
            Some(FileStore::open(folder, args.files_size << 30).context("--files-dir")?)
        }
        None => None,
    };
    let model = ModelArgument::parse(&args.model)?.fetch(is_watched(args.engine.no_progress))?;
    let workload = Workload::serving(args.max_queue, args.steps.overlap == Switch::On);
    let running = start(&model, &args.engine, &args.steps, &args.policy, workload)?;
    config.model_names = match args.served_model_name.is_empty() {
        true => vec![model.name],
        false => args.served_model_name,
    };
    config.pooling = resolve_pooling(args.pooling, &model.path)?;
    config.tool_format = tool_format(args.tool_call_parser);
    config.splits_reasoning = args.reasoning_parser == ReasoningParser::Auto;
    config.limits_queue_time = args.policy.max_queue_time_ms.is_some();
    config.orders_by_priority = args.policy.scheduling_policy == OrderChoice::Priority;
    config.kv_capacities.clone_from(&running.kv_capacities);
    config.vllm_metrics = args.vllm_metrics == Switch::On;
    config.stall_timeout = Duration::from_secs(args.stall_timeout);
    config.shutdown_timeout = Duration::from_secs(args.shutdown_timeout);

    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let collector = args.otlp_endpoint.as_deref();
    let served = runtime.block_on(listen(socket, tls, &running, config, collector));
    // Blocking tasks are encodings whose requests are gone.
    runtime.shutdown_background();
    served.and(running.stop())
}

pub(crate) fn tool_format(parser: ToolCallParser) -> Option<ToolFormat> {
    match parser {
        ToolCallParser::Auto => None,
        ToolCallParser::Hermes => Some(ToolFormat::Hermes),
        ToolCallParser::Llama3 => Some(ToolFormat::Llama3),
        ToolCallParser::Mistral => Some(ToolFormat::Mistral),
    }
}

fn bind(host: &str, port: u16) -> Result<TcpSocket> {
    let addresses = (host, port).to_socket_addrs().with_context(|| format!("--host {host}"))?;
    let Some(address) = addresses.into_iter().next() else { bail!("--host {host}: no address") };
    let bound = || {
        let socket = match address {
            SocketAddr::V4(_) => TcpSocket::new_v4()?,
            SocketAddr::V6(_) => TcpSocket::new_v6()?,
        };
        // A server that has just ended leaves its port waiting.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        Ok::<_, std::io::Error>(socket)
    };
    bound().with_context(|| format!("cannot listen on {address} (--host, --port)"))
}

/// Serves until a signal comes or the engine ends.
async fn listen(
    socket: TcpSocket,
    tls: Option<Tls>,
    running: &Running,
    config: ServerConfig,
    collector: Option<&str>,
) -> Result<()> {
    let listener = socket.listen(MAX_WAITING_CONNECTIONS).context("cannot listen")?;
    let mut summary = running.summary.clone();
    summary.push("names", config.model_names.join(", "));
    let num_keys = config.keys.all().len();
    let open = || "none, everybody may ask (--api-key)".to_owned();
    summary.push("API keys", if num_keys == 0 { open() } else { num_keys.to_string() });
    let scheme = if tls.is_some() { "https" } else { "http" };
    summary.push("address", format!("{scheme}://{}", listener.local_addr()?));
    eprint!("{summary}");

    let client = Arc::clone(&running.client);
    let state = ServerState::new(client, Arc::clone(&running.tokenizer), config);
    if let Some(collector) = collector {
        state.export_spans(collector).map_err(|reason| anyhow!("--otlp-endpoint: {reason}"))?;
    }
    let (signal, engine_ended) = (shutdown_requested()?, running.client.ended());
    let shutdown = async {
        tokio::select! {
            () = signal => {}
            () = engine_ended => tracing::error!("the engine has ended"),
        }
    };
    inflight_server::serve(listener, tls, state.clone(), shutdown).await;
    state.flush_spans().await;
    Ok(())
}
