//! Cold prefixes in a file: a thread reads and writes, the engine only hands blocks over.

use std::collections::VecDeque;
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::thread::JoinHandle;

use inflight_backend::{Backend, BackendError};
use inflight_kv_cache::BlockName;
use inflight_scheduler::{FileBlock, Scheduler};

use crate::cache_file::{CacheFile, CacheFileOptions};
use crate::{Engine, EngineError, block_mover::BlockMover};

/// Blocks that wait for the thread, at most; more are not written this time.
const MOST_WAITING: usize = 64;
/// Blocks handed to the thread in one turn of the engine: copying them is on its way.
const WRITES_PER_TURN: usize = 8;

/// What the thread is to do.
enum Job {
    Read(FileBlock),
    Write(BlockName, Vec<u32>),
}

/// What it has done.
enum Done {
    Read(FileBlock, Option<Vec<u32>>),
    Written { name: BlockName, is_written: bool, replaced: Option<BlockName> },
}

/// The thread, and what is on the way to it and back. Dropped, it waits until all that it was given
/// is written and synced.
pub(crate) struct FileTier {
    /// `None` while it is being dropped.
    jobs: Option<Sender<Job>>,
    /// Blocks that the thread was given and has not written yet.
    num_writing: usize,
    done: Receiver<Done>,
    thread: Option<JoinHandle<()>>,
}

impl FileTier {
    /// Opens the file and tells the scheduler what it has.
    ///
    /// # Errors
    /// When the file cannot be used, or there is no thread.
    pub(crate) fn start(
        options: &CacheFileOptions,
        block_bytes: usize,
        scheduler: &mut Scheduler,
    ) -> Result<Self, EngineError> {
        let file = CacheFile::open(options, block_bytes)?;
        scheduler.use_file(file.names());
        let (jobs, inbox) = mpsc::channel();
        let (sender, done) = mpsc::channel();
        let thread = std::thread::Builder::new().name("cache file".to_owned());
        let thread = thread.spawn(move || work(file, &inbox, &sender))?;
        Ok(Self { jobs: Some(jobs), num_writing: 0, done, thread: Some(thread) })
    }

    /// Takes what was read and written, and hands over what is to be. With `must_wait`, it waits
    /// for something to be done first: nothing else is left to do.
    pub(crate) fn exchange<B: Backend>(
        &mut self,
        backend: &B,
        mover: &BlockMover<B>,
        scheduler: &mut Scheduler,
        must_wait: bool,
    ) -> Result<(), BackendError> {
        let panicked = "the thread of the cache file has panicked";
        let jobs = self.jobs.clone().expect("it is used until it is dropped");
        for block in scheduler.take_file_reads() {
            jobs.send(Job::Read(block)).expect(panicked);
        }
        if must_wait {
            let done = self.done.recv().expect(panicked);
            self.settle(done, backend, mover, scheduler)?;
        }
        loop {
            match self.done.try_recv() {
                Ok(done) => self.settle(done, backend, mover, scheduler)?,
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => panic!("{panicked}"),
            }
        }
        for _ in 0..WRITES_PER_TURN.min(MOST_WAITING - self.num_writing) {
            let Some(block) = scheduler.take_file_write() else { break };
            let words = mover.read_host_block(backend, block.host)?;
            jobs.send(Job::Write(block.name, words)).expect(panicked);
            self.num_writing += 1;
        }
        Ok(())
    }

    fn settle<B: Backend>(
        &mut self,
        done: Done,
        backend: &B,
        mover: &BlockMover<B>,
        scheduler: &mut Scheduler,
    ) -> Result<(), BackendError> {
        match done {
            Done::Read(block, words) => {
                if let Some(words) = &words {
                    mover.write_host_block(backend, block.host, words)?;
                }
                scheduler.file_read(block, words.is_some());
            }
            Done::Written { name, is_written, replaced } => {
                self.num_writing -= 1;
                replaced.iter().for_each(|replaced| scheduler.file_forgot(replaced));
                if is_written {
                    scheduler.file_has(name);
                }
            }
        }
        Ok(())
    }
}

impl<B: Backend> Engine<B> {
    /// Keeps cold prefixes in a file, too, beside the host's memory.
    ///
    /// # Errors
    /// When the file cannot be used.
    pub fn keep_in_file(&mut self, options: &CacheFileOptions) -> Result<(), EngineError> {
        let block_bytes = self.mover.block_bytes();
        self.files = Some(FileTier::start(options, block_bytes, self.scheduler.with_file())?);
        Ok(())
    }

    /// Blocks from the file and for it; with `must_wait`, waits for one.
    pub(crate) fn exchange_files(&mut self, must_wait: bool) -> Result<(), BackendError> {
        let Self { files, backend, mover, scheduler, .. } = self;
        let Some(files) = files else { return Ok(()) };
        files.exchange(backend, mover, scheduler.with_file(), must_wait)
    }

    /// Hands over some of what is to be written, as the thread gets on, while there is nothing else
    /// to do; false when nothing is left.
    pub(crate) fn write_files(&mut self) -> Result<bool, BackendError> {
        let is_full = self.files.as_ref().is_some_and(|files| files.num_writing == MOST_WAITING);
        self.exchange_files(is_full)?;
        Ok(self.files.is_some() && self.scheduler.has_file_writes())
    }
}

impl Drop for FileTier {
    fn drop(&mut self) {
        self.jobs = None;
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of the cache file has panicked");
        }
    }
}

/// Does jobs until no more can come, reads before writes, then syncs the file.
fn work(mut file: CacheFile, inbox: &Receiver<Job>, done: &Sender<Done>) {
    let mut writes = VecDeque::new();
    let mut has_failed = false;
    loop {
        let job = match writes.is_empty() {
            true => inbox.recv().map_err(|_| TryRecvError::Disconnected),
            false => inbox.try_recv(),
        };
        let result = match job {
            Ok(Job::Write(name, words)) => {
                writes.push_back((name, words));
                continue;
            }
            Ok(Job::Read(block)) => Done::Read(block, file.read(&block.name)),
            Err(error) => {
                let Some((name, words)) = writes.pop_front() else {
                    assert_eq!(error, TryRecvError::Disconnected, "it has waited for a job");
                    break;
                };
                write(&mut file, name, &words, &mut has_failed)
            }
        };
        // When the engine has gone, what it had handed over is still written.
        let _ = done.send(result);
    }
    if let Err(error) = file.sync() {
        tracing::warn!(%error, "the cache file may not be whole after a power loss");
    }
}

fn write(file: &mut CacheFile, name: BlockName, words: &[u32], has_failed: &mut bool) -> Done {
    let replaced = file.make_room();
    let written = file.write(name, words);
    if let Err(error) = &written
        && !std::mem::replace(has_failed, true)
    {
        tracing::warn!(%error, "the cache file cannot be written");
    }
    Done::Written { name, is_written: written.is_ok(), replaced }
}
