"""ROS 2 node: torques of a two-link arm from an exported policy, with the memory kept by ArmController.

python3 policy_node.py --ros-args -p policy:=policy.onnx -p rate:=20.0

Subscribes joint_states (sensor_msgs/JointState) and target (geometry_msgs/Point), publishes the torques for an effort
controller of ros2_control (std_msgs/Float64MultiArray), and serves ~/reset (std_srvs/Trigger).
"""

import rclpy
from arm_controller import ArmController
from geometry_msgs.msg import Point
from rclpy.node import Node
from rclpy.qos import qos_profile_sensor_data
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray
from std_srvs.srv import Trigger


class PolicyNode(Node):
    """Steps the policy by a timer."""

    def __init__(self):
        super().__init__("recurl_policy")
        path = self.declare_parameter("policy", "policy.onnx").value
        rate = self.declare_parameter("rate", 20.0).value  # in Hz; recurl/MaskedArm-v0 has steps of 0.05 s
        self.controller = ArmController(path)
        self.commands = self.create_publisher(Float64MultiArray, "effort_controller/commands", 1)
        self.create_subscription(JointState, "joint_states", self.on_joint_state, qos_profile_sensor_data)
        self.create_subscription(Point, "target", self.controller.on_target, 1)
        self.create_service(Trigger, "~/reset", self.on_reset)
        self.create_timer(1 / rate, self.on_timer)

    def seconds(self):
        """Return the time of ROS's clock in s."""
        return self.get_clock().now().nanoseconds * 1e-9

    def on_joint_state(self, message):
        """Keep the joint state and when it came."""
        self.controller.on_joint_state(message, self.seconds())

    def on_timer(self):
        """Publish the torques of a step."""
        self.commands.publish(Float64MultiArray(data=self.controller.step(self.seconds())))

    def on_reset(self, _request, response):
        """Start an episode: the arm was moved by hand, or has another load."""
        self.controller.reset()
        response.success = True
        return response


def main():
    """Run the node until Ctrl-C."""
    rclpy.init()
    try:
        rclpy.spin(PolicyNode())
    except KeyboardInterrupt:
        pass
    finally:
        rclpy.try_shutdown()


if __name__ == "__main__":
    main()
