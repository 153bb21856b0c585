//! The clients of an owner: of a role, and of people and programs that look and scale.

use crate::error::ControlError;
use crate::place::ControlPlace;
use crate::role::{Heartbeat, Lease, Orders, Registration, RoleId, RoleKind, RoleView, ScalePlan};
use crate::wire::{Added, FENCE, RolesPage, ScaleBody};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use sinew_http::blocking::{Client, RequestBuilder, retry};
use sinew_http::{Authorities, ClientOptions, Failure, Method, Retry, line, may_pass};
use std::time::{Duration, Instant};

/// Time for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for which a registration is repeated while the owner does not answer.
const PATIENCE: Duration = Duration::from_secs(120);
/// Pauses between two attempts. Only the patience ends them.
const PAUSES: Retry = Retry::doubling(u32::MAX, Duration::from_millis(100), Duration::from_secs(5));
/// Maximum bytes of an answer.
const MAX_ANSWER: u64 = 16 << 20;

/// Calls to an owner, with a token.
#[derive(Clone, Debug)]
pub struct OwnerClient {
    http: Client,
    url: String,
    token: Secret,
}

/// A text that is not shown.
#[derive(Clone)]
struct Secret(String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(hidden)")
    }
}

/// The limits of calls to an owner, for [`OwnerClient::through`].
pub fn client_options() -> ClientOptions {
    ClientOptions {
        connect: Some(CONNECT_TIMEOUT),
        deadline: Some(ANSWER_TIMEOUT),
        body_max: MAX_ANSWER,
        ..ClientOptions::default()
    }
}

impl OwnerClient {
    /// The owner at `url`, such as `http://127.0.0.1:8092`. Nothing is sent.
    ///
    /// # Errors
    /// If the address is none.
    pub fn new(url: &str, token: &str) -> Result<Self, ControlError> {
        let http = Client::new(client_options()).map_err(|e| unreachable(url, e.to_string()))?;
        Self::through(http, url, token)
    }

    /// The owner at `url`, through a client with other trust.
    ///
    /// # Errors
    /// If the address is none.
    pub fn through(http: Client, url: &str, token: &str) -> Result<Self, ControlError> {
        sinew_http::address(url)
            .map_err(|e| ControlError::field("the owner", url, e.to_string()))?;
        Ok(Self {
            http,
            url: url.trim_end_matches('/').to_owned(),
            token: Secret(token.trim().to_owned()),
        })
    }

    /// The owner that a file of a run's folder names.
    ///
    /// # Errors
    /// If the files of token or authority cannot be read.
    pub fn at(place: &ControlPlace) -> Result<Self, ControlError> {
        let authorities = place
            .ca_file
            .as_deref()
            .map(Authorities::from_file)
            .transpose();
        let failed = |why: String| unreachable(&place.url, why);
        let options = ClientOptions {
            authorities: authorities.map_err(|e| failed(e.to_string()))?,
            ..client_options()
        };
        let http = Client::new(options).map_err(|e| failed(e.to_string()))?;
        Self::through(http, &place.url, &place.token()?)
    }

    /// Address of the owner.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// All roles with the wanted counts and the last events, or those of one kind.
    ///
    /// # Errors
    /// If the owner does not answer or refuses.
    pub fn page(&self, kind: Option<RoleKind>) -> Result<RolesPage, ControlError> {
        let filter = kind.map_or_else(String::new, |kind| format!("?kind={kind}"));
        let request = self.request(Method::GET, &format!("/roles{filter}"), None);
        self.ask(request)
    }

    /// Sets the wanted count of a kind, which is absolute: the same call again changes nothing.
    ///
    /// # Errors
    /// If the owner does not answer or refuses.
    pub fn scale(
        &self,
        kind: RoleKind,
        count: u32,
        dry_run: bool,
    ) -> Result<ScalePlan, ControlError> {
        let request = self.request(Method::PUT, &format!("/roles/{kind}"), None);
        self.ask(json(request, &ScaleBody { count, dry_run }))
    }

    /// Adds a server that runs already and sends no heartbeats: the owner asks it itself.
    ///
    /// # Errors
    /// If the owner does not answer or refuses.
    pub fn add(&self, registration: &Registration) -> Result<RoleId, ControlError> {
        let request = self.request(Method::POST, "/roles?outside=true", None);
        let added: Added = self.ask(json(request, registration))?;
        Ok(added.id)
    }

    /// Lets a role end its work and leave.
    ///
    /// # Errors
    /// If the owner does not answer or refuses.
    pub fn drain(&self, id: &RoleId) -> Result<(), ControlError> {
        let request = self.request(Method::POST, &format!("/roles/{id}/drain"), None);
        self.ask::<Value>(request).map(drop)
    }

    /// Asks the run to end: commit, checkpoint, then all roles.
    ///
    /// # Errors
    /// If the owner does not answer or refuses.
    pub fn stop(&self) -> Result<(), ControlError> {
        let request = self.request(Method::POST, "/roles/stop", None);
        self.ask::<Value>(request).map(drop)
    }

    fn request(&self, method: Method, path: &str, fence: Option<u64>) -> RequestBuilder {
        let url = format!("{}{path}", self.url);
        let request = self.http.request(method, &url).bearer_auth(&self.token.0);
        match fence {
            Some(fence) => request.header(FENCE, fence.to_string()),
            None => request,
        }
    }

    /// One attempt.
    fn try_once<T: DeserializeOwned>(
        &self,
        request: RequestBuilder,
    ) -> Result<T, Failure<ControlError>> {
        let answer = self.http.ask(request)?;
        let status = answer.status.as_u16();
        if answer.status.is_success() {
            return serde_json::from_slice(&answer.body).map_err(|e| {
                let why = format!("its answer cannot be read: {e}");
                Failure::Lasting(unreachable(&self.url, why))
            });
        }
        let refusal = refused(&self.url, status, &answer.body);
        if may_pass(status) && !matches!(refusal, ControlError::Full(_)) {
            return Err(Failure::Passing(refusal.to_string(), None));
        }
        Err(Failure::Lasting(refusal))
    }

    /// One attempt, whose failure is final.
    fn ask<T: DeserializeOwned>(&self, request: RequestBuilder) -> Result<T, ControlError> {
        self.try_once(request).map_err(|failure| self.last(failure))
    }

    fn last(&self, failure: Failure<ControlError>) -> ControlError {
        match failure {
            Failure::Lasting(error) => error,
            Failure::Passing(why, _) => unreachable(&self.url, why),
        }
    }
}

fn unreachable(url: &str, why: String) -> ControlError {
    ControlError::Unreachable {
        url: url.to_owned(),
        why,
    }
}

/// Adds a JSON body.
fn json(request: RequestBuilder, body: &impl Serialize) -> RequestBuilder {
    // These bodies are plain structures, which always have a form in JSON.
    let body = serde_json::to_vec(body).unwrap_or_default();
    request
        .header(sinew_http::header::CONTENT_TYPE, "application/json")
        .body(body)
}

/// The error that a refusal of the owner stands for.
fn refused(url: &str, status: u16, body: &[u8]) -> ControlError {
    let value: Value = serde_json::from_slice(body).unwrap_or_default();
    let error = &value["error"];
    let number = |name: &str| error[name].as_u64().unwrap_or_default();
    let id = || error["id"].as_str().unwrap_or_default().to_owned();
    match error["code"].as_str() {
        Some("gone") => ControlError::Gone(id()),
        Some("superseded") => ControlError::Superseded(id()),
        Some("fenced") => ControlError::Fenced {
            given: number("given"),
            own: number("own"),
        },
        Some("full") => ControlError::Full(usize::try_from(number("limit")).unwrap_or(usize::MAX)),
        _ => ControlError::Refused {
            url: url.to_owned(),
            status,
            message: match error["message"].as_str() {
                Some(text) => line(text.as_bytes(), 400),
                None => line(body, 200),
            },
        },
    }
}

/// A registered role. Dropping it leaves the registration to end by itself.
#[derive(Clone, Debug)]
pub struct RoleClient {
    owner: OwnerClient,
    registration: Registration,
    lease: Lease,
}

impl RoleClient {
    /// Registers a role, and repeats this for two minutes while the owner does not answer.
    ///
    /// # Errors
    /// If the owner does not answer in this time, or refuses.
    pub fn register(
        owner: &str,
        token: &str,
        registration: &Registration,
    ) -> Result<Self, ControlError> {
        Self::register_through(OwnerClient::new(owner, token)?, registration)
    }

    /// Registers a role through a client that is there.
    ///
    /// # Errors
    /// As [`RoleClient::register`].
    pub fn register_through(
        owner: OwnerClient,
        registration: &Registration,
    ) -> Result<Self, ControlError> {
        let lease = leased(&owner, registration, None)?;
        Ok(Self {
            owner,
            registration: registration.clone(),
            lease,
        })
    }

    /// Registers again after [`ControlError::Gone`], under the same name.
    ///
    /// # Errors
    /// As [`RoleClient::register`]. An owner with a lower fence than the last one is refused.
    pub fn again(&mut self) -> Result<(), ControlError> {
        let named = Registration {
            name: self.lease.id.to_string(),
            ..self.registration.clone()
        };
        self.lease = leased(&self.owner, &named, Some(self.lease.fence))?;
        Ok(())
    }

    /// The lease of the last registration.
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Renews the lease, once: the answer has what to do.
    ///
    /// # Errors
    /// [`ControlError::Gone`] if the lease ended or a newer owner took over: register again.
    /// [`ControlError::Superseded`] if another process has the place. If the owner does not answer, the lease
    /// may still hold.
    pub fn beat(&self, heartbeat: &Heartbeat) -> Result<Orders, ControlError> {
        let path = format!("/roles/{}/beat", self.lease.id);
        let request = self
            .owner
            .request(Method::POST, &path, Some(self.lease.fence));
        let orders: Orders = self.answered(self.owner.ask(json(request, heartbeat)))?;
        self.of_this_owner(orders.fence)?;
        Ok(orders)
    }

    /// Reports that this role takes no more work, such as after a notice that its host goes away.
    ///
    /// # Errors
    /// As [`RoleClient::beat`].
    pub fn drain(&self) -> Result<(), ControlError> {
        let path = format!("/roles/{}/drain", self.lease.id);
        let request = self
            .owner
            .request(Method::POST, &path, Some(self.lease.fence));
        self.answered(self.owner.ask::<Value>(request)).map(drop)
    }

    /// Ends the registration. A role that is gone already has left.
    ///
    /// # Errors
    /// If the owner does not answer or refuses.
    pub fn leave(&self) -> Result<(), ControlError> {
        let path = format!("/roles/{}", self.lease.id);
        let request = self
            .owner
            .request(Method::DELETE, &path, Some(self.lease.fence));
        match self.answered(self.owner.ask::<Value>(request)) {
            Ok(_) | Err(ControlError::Gone(_) | ControlError::Superseded(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The roles of an owner, all or those of one kind.
    ///
    /// # Errors
    /// If the owner does not answer or refuses.
    pub fn roles(
        owner: &str,
        token: &str,
        kind: Option<RoleKind>,
    ) -> Result<Vec<RoleView>, ControlError> {
        Ok(OwnerClient::new(owner, token)?.page(kind)?.roles)
    }

    /// The owner that this role belongs to.
    pub fn owner(&self) -> &OwnerClient {
        &self.owner
    }

    /// A newer owner does not know this lease: it has ended.
    fn answered<T>(&self, answer: Result<T, ControlError>) -> Result<T, ControlError> {
        match answer {
            Err(ControlError::Fenced { given, own }) if own > given => {
                Err(ControlError::Gone(self.lease.id.to_string()))
            }
            other => other,
        }
    }

    /// Refuses the answer of another generation.
    fn of_this_owner(&self, own: u64) -> Result<(), ControlError> {
        let given = self.lease.fence;
        match own.cmp(&given) {
            std::cmp::Ordering::Equal => Ok(()),
            std::cmp::Ordering::Greater => Err(ControlError::Gone(self.lease.id.to_string())),
            std::cmp::Ordering::Less => Err(ControlError::Fenced { given, own }),
        }
    }
}

/// Registers, with the fence of the last owner if there was one.
fn leased(
    owner: &OwnerClient,
    registration: &Registration,
    fence: Option<u64>,
) -> Result<Lease, ControlError> {
    let end = Instant::now() + PATIENCE;
    let left = |pause: Duration| {
        let left = end.saturating_duration_since(Instant::now());
        (!left.is_zero()).then(|| pause.min(left))
    };
    let attempt = || {
        let request = owner.request(Method::POST, "/roles", fence);
        owner.try_once::<Lease>(json(request, registration))
    };
    let lease = retry(PAUSES, left, attempt).map_err(|failure| owner.last(failure))?;
    match fence {
        Some(given) if lease.fence < given => Err(ControlError::Fenced {
            given,
            own: lease.fence,
        }),
        _ => Ok(lease),
    }
}
