#include "server/health.h"

#include <grpcpp/health_check_service_interface.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

namespace attendant::server {
namespace {

class FakeService final : public grpc::HealthCheckServiceInterface {
 public:
  void SetServingStatus(const std::string& name, bool serving) override {
    serving_[name] = serving;
  }
  void SetServingStatus(bool /*serving*/) override {}
  void Shutdown() override {}

  bool ready() { return serving_.at("") && serving_.at("attendant.v1.Attention"); }
  bool unready() { return !serving_.at("") && !serving_.at("attendant.v1.Attention"); }
  bool live() { return serving_.at("liveness"); }

 private:
  std::map<std::string, bool> serving_;
};

class HealthTest : public testing::Test {
 protected:
  HealthTest() { health_.Serve(&service_); }
  FakeService service_;
  Health health_;
};

TEST_F(HealthTest, ServesFromTheStart) {
  EXPECT_TRUE(service_.ready());
  EXPECT_TRUE(service_.live());
}

TEST_F(HealthTest, AFaultTakesReadinessUntilTheEngineIsSound) {
  health_.SetEngine(Engine::kFaulty);
  EXPECT_TRUE(service_.unready());
  EXPECT_TRUE(service_.live());
  health_.SetEngine(Engine::kSound);
  EXPECT_TRUE(service_.ready());
}

TEST_F(HealthTest, ABrokenEngineTakesLivenessToo) {
  health_.SetEngine(Engine::kBroken);
  EXPECT_TRUE(service_.unready());
  EXPECT_FALSE(service_.live());
}

TEST_F(HealthTest, AShutdownIsForGood) {
  health_.SetEngine(Engine::kFaulty);
  health_.StopBeingReady();
  health_.SetEngine(Engine::kSound);
  EXPECT_TRUE(service_.unready());
  EXPECT_TRUE(service_.live());
}

TEST_F(HealthTest, TellsWhatHappenedBeforeThereWasAService) {
  Health early;
  early.SetEngine(Engine::kFaulty);
  FakeService service;
  early.Serve(&service);
  EXPECT_TRUE(service.unready());
  early.Serve(nullptr);
  early.SetEngine(Engine::kSound);
  EXPECT_TRUE(service.unready());
}

}  // namespace
}  // namespace attendant::server
