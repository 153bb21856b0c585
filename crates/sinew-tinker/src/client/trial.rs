//! A round trip to a service, for people who look for what is wrong.

use super::api::BaseModel;
use super::error::ClientError;
use super::options::ServiceOptions;
use super::scorer::{Sampler, short_request};
use super::service::Service;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Token that every model has.
const TOKEN: u32 = 0;

/// A service that was tried.
#[derive(Clone, Debug, PartialEq)]
pub struct Trial {
    /// Its base models.
    pub models: Vec<BaseModel>,
    /// The base model that was sampled, and the time until its first token; `None`: none can be sampled.
    pub sampled: Option<(String, Duration)>,
}

/// Opens a session at a service that must answer within `limit`, and samples one token of its first base
/// model. It must not be called on a thread of an async runtime.
///
/// # Errors
/// The first step that fails.
pub fn try_service(options: &ServiceOptions, limit: Duration) -> Result<Trial, ClientError> {
    let service = Arc::new(Service::open_within(options, limit)?);
    let models = service.models()?;
    let first = models.iter().find(|model| model.sampleable != Some(false));
    let sampled = match first {
        Some(model) => Some((model.name.clone(), round_trip(&service, &model.name)?)),
        None => None,
    };
    Ok(Trial { models, sampled })
}

/// The time that one token of a base model takes.
fn round_trip(service: &Arc<Service>, name: &str) -> Result<Duration, ClientError> {
    let mut sampler = Sampler::open(Arc::clone(service), name)?;
    let started = Instant::now();
    sampler.prompts(vec![short_request(vec![TOKEN])])?;
    Ok(started.elapsed())
}
