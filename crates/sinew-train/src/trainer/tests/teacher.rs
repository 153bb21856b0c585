//! The teacher's term of the loss.

use super::*;

#[derive(serde::Deserialize)]
struct TeacherGolden {
    top_k: u32,
    coefficient: f32,
    cases: Vec<TeacherCase>,
}

#[derive(serde::Deserialize)]
struct TeacherCase {
    divergence: Divergence,
    loss: f64,
    gradient: Vec<f64>,
}

#[test]
fn the_teacher_s_term_is_its_formula_differentiated() {
    let text = include_str!("../../../tests/golden/teacher.json");
    let golden: TeacherGolden = serde_json::from_str(text).unwrap();
    let mut teacher = Bigram::new(8);
    teacher.logits = (0..64).map(|i| 2.0 * (i as f32 * 0.3).cos()).collect();
    for case in &golden.cases {
        for micro_batch_tokens in [64, 6] {
            let spec = LossSpec {
                teacher: Some(TeacherSpec {
                    top_k: golden.top_k,
                    divergence: case.divergence,
                    coefficient: golden.coefficient,
                }),
                ..LossSpec::new(Surrogate::Reinforce)
            };
            let mut trainer = trainer(TrainerConfig::new(micro_batch_tokens, 1e-12));
            let mut rows = batch(trainer.policy());
            rows.iter_mut().for_each(|r| r.advantages.fill(0.0));
            let missing = trainer.step(&rows, &spec).unwrap_err().to_string();
            assert!(missing.contains("teacher's distribution"), "{missing}");
            let k = golden.top_k as usize;
            let tops = score_top(&mut teacher, &rows, micro_batch_tokens, k).unwrap();
            for (row, top) in rows.iter_mut().zip(tops) {
                row.teacher_top = Some(top);
            }
            let report = trainer.step(&rows, &spec).unwrap();
            assert!((report.loss - case.loss).abs() < 1e-6, "{report:?}");
            assert!((report.metrics.teacher_loss - case.loss).abs() < 1e-6);
            for (g, e) in trainer.policy().gradient.iter().zip(&case.gradient) {
                assert!((f64::from(*g) - e).abs() < 1e-6, "{g} {e}");
            }
        }
    }
}
