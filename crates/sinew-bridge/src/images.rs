//! Workers in images that tasks name.
//!
//! A task names its image in the column [`IMAGE_COLUMN`], and its session runs in a worker whose root is that
//! image. The number of places is that of the workers. A place holds one worker, of one image at a time; a
//! new image takes the place that was without sessions for longest. Each image has a separate provider of
//! sandboxes, which lives as long as a worker of that image.
//!
//! The class and its package of this program are shown inside. Everything else is the image's: its
//! interpreter, its packages, its files, read-only.

use crate::code::PythonCode;
use crate::error::{CallError, StartError};
use crate::lock::lock;
use crate::plan::Plan;
use crate::runs::HostHelp;
use crate::session::{Session, StartTimes};
use crate::worker::Worker;
use serde_json::Value;
use sinew_env::{IMAGE_COLUMN, TaskImage};
use sinew_sandbox::SandboxSpec;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Paths of the interpreter that are tried in an image.
const PYTHONS: [&str; 3] = ["/usr/bin/python3", "/usr/local/bin/python3", "/bin/python3"];

/// Images that tasks may name.
#[derive(Clone, Debug, Default)]
pub struct TaskImages {
    /// Images by name.
    pub images: BTreeMap<String, TaskImage>,
    /// Path of the interpreter in each image; empty: where Debian and the images of Python have it.
    pub python: String,
}

/// Common settings of the workers of all images.
pub(crate) struct Common {
    /// The class, without an interpreter.
    pub(crate) code: PythonCode,
    pub(crate) spec: SandboxSpec,
    pub(crate) workers: usize,
    pub(crate) sessions_per_worker: usize,
    pub(crate) help: Arc<HostHelp>,
    pub(crate) timeout: Duration,
    pub(crate) startup_timeout: Duration,
}

/// A place of a worker, for its choice.
#[derive(Clone, Debug, Default)]
struct Place {
    /// Name of the image; empty before the first session.
    image: String,
    /// Sessions that use it.
    users: usize,
    /// Order of the last session's end, as a number that grows.
    used: u64,
}

/// Content of a place.
struct PlaceContent {
    image: String,
    /// `None` where the start failed.
    worker: Option<Arc<Worker>>,
    /// Keeps the provider of the image.
    _plan: Arc<Plan>,
}

/// The workers in images.
pub(crate) struct ImageWorkers {
    images: TaskImages,
    common: Common,
    places: Mutex<Vec<Place>>,
    /// The worker of each place.
    held: Vec<tokio::sync::Mutex<Option<PlaceContent>>>,
    /// Plans by image, as long as a worker of it lives.
    plans: Mutex<BTreeMap<String, Weak<Plan>>>,
    /// A session has ended.
    freed: Notify,
    next_session: AtomicU64,
    clock: AtomicU64,
    starts: StartTimes,
}

impl ImageWorkers {
    /// Places for workers; none starts yet.
    ///
    /// # Errors
    /// If an image has no interpreter.
    pub(crate) fn new(images: TaskImages, common: Common) -> Result<Self, StartError> {
        for (name, image) in &images.images {
            if python_in(&image.root, &images.python).is_none() {
                let looked = match images.python.as_str() {
                    "" => PYTHONS.join(", "),
                    given => given.to_owned(),
                };
                return Err(StartError::Config {
                    field: "env.image_python",
                    value: format!("{:?}", images.python),
                    allowed: format!(
                        "image {name:?} has no {looked}; allowed: the path of a Python 3.8 or later in every image"
                    ),
                });
            }
        }
        let workers = common.workers;
        Ok(Self {
            images,
            places: Mutex::new(vec![Place::default(); workers]),
            held: (0..workers)
                .map(|_| tokio::sync::Mutex::default())
                .collect(),
            plans: Mutex::default(),
            freed: Notify::new(),
            next_session: AtomicU64::new(1),
            clock: AtomicU64::new(1),
            starts: StartTimes::new(workers),
            common,
        })
    }

    /// The image that a task names; `None` if it names none.
    ///
    /// # Errors
    /// If there is no such image.
    pub(crate) fn named(&self, task: &Value) -> Result<Option<String>, CallError> {
        let Some(named) = task["data"].get(IMAGE_COLUMN) else {
            return Ok(None);
        };
        let images = &self.images.images;
        match named.as_str().filter(|name| images.contains_key(*name)) {
            Some(name) => Ok(Some(name.to_owned())),
            None => Err(CallError::Start(StartError::Config {
                field: "the column image of a task",
                value: named.to_string(),
                allowed: format!(
                    "task {}: sandbox.images has no such image; add it, or correct the row",
                    task["id"]
                ),
            })),
        }
    }

    /// Opens a session in a worker of an image. It waits for a place, at most as long as a start may take.
    ///
    /// # Errors
    /// If no place is free in time, or the worker does not start.
    pub(crate) async fn session(
        this: &Arc<Self>,
        image: &str,
        handle: Handle,
    ) -> Result<Session, CallError> {
        let give_up = Instant::now() + this.common.startup_timeout;
        let seat = loop {
            let freed = this.freed.notified();
            tokio::pin!(freed);
            // A session that ends between the look and the wait is noticed.
            freed.as_mut().enable();
            if let Some(seat) = Self::seat(this, image) {
                break seat;
            }
            if tokio::time::timeout_at(give_up, freed).await.is_err() {
                let workers = this.held.len();
                return Err(CallError::Busy(format!(
                    "all {workers} workers run other images; raise workers"
                )));
            }
        };
        let worker = this.worker(seat.at, image).await?;
        let id = this.next_session.fetch_add(1, Ordering::Relaxed);
        let timeout = this.common.timeout;
        Ok(Session::new(id, worker, handle, timeout, Box::new(seat)))
    }

    /// A place for one more session of an image.
    fn seat(this: &Arc<Self>, image: &str) -> Option<Seat> {
        let mut places = lock(&this.places);
        let most = this.common.sessions_per_worker;
        let fits = |p: &Place| p.users == 0 || p.image == image && p.users < most;
        let worth = |p: &Place| {
            let other = p.image != image;
            (p.users, other, other && !p.image.is_empty(), p.used)
        };
        let fitting = places.iter_mut().enumerate().filter(|(_, p)| fits(p));
        let (at, place) = fitting.min_by_key(|(_, p)| worth(p))?;
        place.users += 1;
        image.clone_into(&mut place.image);
        Some(Seat {
            workers: Arc::clone(this),
            at,
        })
    }

    /// The worker of a place, started if there is none of this image that lives.
    async fn worker(&self, at: usize, image: &str) -> Result<Arc<Worker>, CallError> {
        let mut held = self.held[at].lock().await;
        let before = held.as_ref().filter(|h| h.image == image);
        let alive = before.and_then(|h| h.worker.as_ref());
        if let Some(worker) = alive.filter(|worker| worker.is_alive()) {
            return Ok(Arc::clone(worker));
        }
        // A change of the image is not a sign of code that ends its workers, nor is the end of a spent one.
        if before.is_some() && alive.is_none_or(|worker| !worker.is_spent()) {
            self.starts.wait(self.common.startup_timeout).await?;
        }
        // The worker of another image leaves before the next one starts.
        *held = None;
        let plan = self.plan(image).await?;
        let started = Worker::start(&plan).await.map(Arc::new);
        *held = Some(PlaceContent {
            image: image.to_owned(),
            worker: started.as_ref().ok().cloned(),
            _plan: plan,
        });
        Ok(started?)
    }

    /// The plan that starts workers of an image.
    async fn plan(&self, image: &str) -> Result<Arc<Plan>, CallError> {
        if let Some(plan) = lock(&self.plans).get(image).and_then(Weak::upgrade) {
            return Ok(plan);
        }
        let missing = || StartError::Worker(format!("there is no image {image:?}"));
        let found = self.images.images.get(image).ok_or_else(missing)?;
        let python = python_in(&found.root, &self.images.python).ok_or_else(missing)?;
        let code = self.common.code.with_python(python);
        // A dead worker leaves after its successor has come.
        let (maker, root, live) = (code.clone(), found.root.clone(), 2 * self.held.len());
        let made = tokio::task::spawn_blocking(move || maker.image_provider(&root, live));
        let provider = made
            .await
            .map_err(|e| StartError::Worker(e.to_string()))??;
        let mut spec = self.common.spec.clone();
        spec.env = [found.env.clone(), spec.env].concat();
        let plan = Arc::new(Plan {
            provider,
            spec,
            code,
            timeout: self.common.timeout,
            startup_timeout: self.common.startup_timeout,
            help: Arc::clone(&self.common.help),
            shared: self.common.sessions_per_worker > 1,
        });
        let mut plans = lock(&self.plans);
        plans.retain(|_, plan| plan.strong_count() > 0);
        plans.insert(image.to_owned(), Arc::downgrade(&plan));
        Ok(plan)
    }
}

/// Returns the path of the interpreter of an image, if it exists. A link counts without a look at its target,
/// since it is followed inside the sandbox.
fn python_in(root: &Path, given: &str) -> Option<String> {
    let there = |path: &str| {
        let below = root.join(path.trim_start_matches('/'));
        below.symlink_metadata().is_ok_and(|found| !found.is_dir())
    };
    let found = match given {
        "" => PYTHONS.into_iter().find(|path| there(path))?,
        given => Some(given).filter(|path| path.starts_with('/') && there(path))?,
    };
    Some(found.to_owned())
}

/// A session's share of a place.
struct Seat {
    workers: Arc<ImageWorkers>,
    at: usize,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let used = self.workers.clock.fetch_add(1, Ordering::Relaxed);
        {
            let mut places = lock(&self.workers.places);
            places[self.at].users -= 1;
            places[self.at].used = used;
        }
        self.workers.freed.notify_waiters();
    }
}
