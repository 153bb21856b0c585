//! Launchers of Ray and Kubernetes against stand-ins that answer as the real ones do.

use crate::Served;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use sinew_control::{
    KubernetesAccess, KubernetesLauncher, KubernetesOptions, Launched, Launcher, RayLauncher,
    RoleSpec,
};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Objects by name or path.
type Kept = State<Arc<Mutex<BTreeMap<String, Value>>>>;

fn spec(name: &str) -> RoleSpec {
    RoleSpec {
        name: name.into(),
        command: vec!["sinew".into(), "worker".into()],
        env: vec![("SINEW_LOG".into(), "info".into())],
        folder: Some("/shared".into()),
        cpus: 2,
        gpus: 1,
        memory_mb: Some(64),
        requeue: false,
    }
}

async fn ray_submit(State(jobs): Kept, Json(mut job): Json<Value>) -> Response {
    let mut jobs = jobs.lock().unwrap();
    let id = job["submission_id"].as_str().unwrap().to_owned();
    if jobs.contains_key(&id) || job["entrypoint_num_cpus"].as_u64() > Some(64) {
        // Ray 2.60 answers so, not with 409.
        let text =
            format!("Traceback ...\nValueError: Job with submission_id {id} already exists.");
        return (StatusCode::INTERNAL_SERVER_ERROR, text).into_response();
    }
    job["status"] = json!("RUNNING");
    jobs.insert(id.clone(), job);
    Json(json!({"job_id": id, "submission_id": id})).into_response()
}

async fn ray_list(State(jobs): Kept) -> Json<Value> {
    Json(jobs.lock().unwrap().values().cloned().collect())
}

async fn ray_job(State(jobs): Kept, Path(id): Path<String>) -> Response {
    match jobs.lock().unwrap().get(&id) {
        Some(job) => Json(job.clone()).into_response(),
        None => (StatusCode::NOT_FOUND, format!("Job {id} does not exist")).into_response(),
    }
}

async fn ray_stop(State(jobs): Kept, Path(id): Path<String>) -> Response {
    match jobs.lock().unwrap().get_mut(&id) {
        Some(job) => {
            job["status"] = json!("STOPPED");
            Json(json!({"stopped": true})).into_response()
        }
        None => (StatusCode::NOT_FOUND, "does not exist").into_response(),
    }
}

#[test]
fn ray_jobs_are_submitted_once_and_found_by_name() {
    let jobs: Arc<Mutex<BTreeMap<String, Value>>> = Arc::default();
    let other = json!({"submission_id": null, "status": "RUNNING"});
    jobs.lock().unwrap().insert("other".into(), other);
    let router = Router::new()
        .route("/api/jobs/", get(ray_list).post(ray_submit))
        .route("/api/jobs/{id}", get(ray_job))
        .route("/api/jobs/{id}/stop", post(ray_stop))
        .route(
            "/api/jobs/{id}/logs",
            get(async || Json(json!({"logs": "one\ntwo\n"}))),
        )
        .with_state(Arc::clone(&jobs));
    let served = Served::new(router);
    let ray = RayLauncher::new(&served.url().replace("http://", "ray://"), "demo-1").unwrap();
    let role = spec("demo-1-rollout-0-0");
    ray.ensure(&role).unwrap();
    ray.ensure(&role).unwrap();
    let job = jobs.lock().unwrap()["demo-1-rollout-0-0"].clone();
    assert_eq!(job["entrypoint"], "cd /shared && exec sinew worker");
    assert_eq!(job["runtime_env"]["env_vars"]["SINEW_LOG"], "info");
    assert_eq!(
        (&job["entrypoint_num_gpus"], &job["entrypoint_memory"]),
        (&json!(1), &json!(64 << 20))
    );
    let listed = ray.list().unwrap();
    assert_eq!((listed.len(), &listed[0].state), (1, &Launched::Running));
    assert_eq!(ray.logs(&role.name, 1).unwrap(), "two");
    assert_eq!(ray.logs("demo-1-rollout-1-0", 1).unwrap(), "");
    ray.stop(&role.name).unwrap();
    assert!(matches!(ray.list().unwrap()[0].state, Launched::Ended(_)));
    ray.stop("demo-1-rollout-1-0").unwrap();
    let large = RoleSpec {
        cpus: 65,
        ..spec("demo-1-rollout-2-0")
    };
    let why = ray.ensure(&large).unwrap_err().to_string();
    assert!(why.contains("500"), "{why}");
    assert!(RayLauncher::new("head", "demo-1").is_err());
}

async fn kube_create(
    State(objects): Kept,
    uri: Uri,
    headers: HeaderMap,
    Json(mut object): Json<Value>,
) -> Response {
    if headers
        .get("authorization")
        .is_none_or(|value| value != "Bearer secret")
    {
        let body = json!({"kind": "Status", "message": "Unauthorized", "code": 401});
        return (StatusCode::UNAUTHORIZED, Json(body)).into_response();
    }
    let name = object["metadata"]["name"].as_str().unwrap().to_owned();
    let path = format!("{}/{name}", uri.path());
    let mut objects = objects.lock().unwrap();
    if objects.contains_key(&path) {
        let body =
            json!({"kind": "Status", "reason": "AlreadyExists", "message": "exists", "code": 409});
        return (StatusCode::CONFLICT, Json(body)).into_response();
    }
    object["status"] = json!({"active": 1});
    objects.insert(path, object.clone());
    (StatusCode::CREATED, Json(object)).into_response()
}

async fn kube_list(State(objects): Kept, uri: Uri) -> Json<Value> {
    let below = format!("{}/", uri.path());
    let objects = objects.lock().unwrap();
    let items = objects.iter().filter(|(path, _)| path.starts_with(&below));
    let items: Vec<Value> = items.map(|(_, object)| object.clone()).collect();
    Json(json!({"kind": "JobList", "items": items}))
}

async fn kube_replace(State(objects): Kept, uri: Uri, Json(object): Json<Value>) -> Json<Value> {
    objects
        .lock()
        .unwrap()
        .insert(uri.path().to_owned(), object.clone());
    Json(object)
}

async fn kube_delete(State(objects): Kept, uri: Uri) -> Response {
    match objects.lock().unwrap().remove(uri.path()) {
        Some(_) => Json(json!({"kind": "Status", "status": "Success"})).into_response(),
        None => (StatusCode::NOT_FOUND, Json(json!({"message": "not found"}))).into_response(),
    }
}

fn cluster() -> Served {
    let objects = post(kube_create).get(kube_list);
    let object = get(async || "log line\n")
        .put(kube_replace)
        .delete(kube_delete);
    let router = Router::new()
        .route("/api/v1/namespaces/ns/{kind}", objects.clone())
        .route("/api/v1/namespaces/ns/{kind}/{name}", object.clone())
        .route("/apis/{group}/v1/namespaces/ns/{kind}", objects)
        .route("/apis/{group}/v1/namespaces/ns/{kind}/{name}", object)
        .with_state(Arc::default());
    Served::new(router)
}

fn options() -> KubernetesOptions {
    KubernetesOptions {
        run: "demo-123456".into(),
        namespace: Some("ns".into()),
        image: "sinew:1".into(),
        folder: "/runs".into(),
        claim: None,
        port: 8092,
    }
}

#[test]
fn kubernetes_jobs_are_created_once_listed_and_deleted() {
    let served = cluster();
    let access = KubernetesAccess::new(&served.url(), "secret", None);
    let cluster = KubernetesLauncher::new(access, options()).unwrap();
    let role = spec("demo-123456-rollout-0-0");
    cluster.ensure(&role).unwrap();
    cluster.ensure(&role).unwrap();
    let listed = cluster.list().unwrap();
    assert_eq!(
        (listed.len(), listed[0].name.as_str()),
        (1, "demo-123456-rollout-0-0")
    );
    assert_eq!(listed[0].state, Launched::Running);
    assert_eq!(cluster.logs(&role.name, 5).unwrap(), "");
    cluster.stop(&role.name).unwrap();
    cluster.stop(&role.name).unwrap();
    assert!(cluster.list().unwrap().is_empty());
}

#[test]
fn the_objects_of_a_run_are_created_and_its_recipe_is_replaced() {
    let served = cluster();
    let access = KubernetesAccess::new(&served.url(), "secret", None);
    let cluster = KubernetesLauncher::new(access, options()).unwrap();
    let owner = spec("demo-123456-owner-0-0");
    for recipe in ["name = \"a\"\n", "name = \"b\"\n"] {
        let made = options().run(&owner, recipe, "token").unwrap();
        cluster.create_all(&made).unwrap();
    }
    assert_eq!(cluster.list().unwrap().len(), 1);
    let stranger = KubernetesAccess::new(&served.url(), "other", None);
    let stranger = KubernetesLauncher::new(stranger, options()).unwrap();
    let why = stranger
        .ensure(&spec("demo-123456-rollout-0-0"))
        .unwrap_err()
        .to_string();
    assert!(why.contains("401") && why.contains("Unauthorized"), "{why}");
    let wrong = KubernetesOptions {
        namespace: Some("a b".into()),
        ..options()
    };
    let access = KubernetesAccess::new(&served.url(), "secret", None);
    assert!(KubernetesLauncher::new(access, wrong).is_err());
}
